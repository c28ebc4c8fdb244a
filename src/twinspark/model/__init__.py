"""The forward pass, one concept a file. Read `transformer.py` first."""
