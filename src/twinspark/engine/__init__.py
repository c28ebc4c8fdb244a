"""The loop: plan, run, choose, commit. Read `core.py` first."""
