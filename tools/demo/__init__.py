"""The scripts that made the demo pack: tokenizer, data, differentiable twin, training, export.

Nothing here is imported by the product. Read next: `README.md` beside this file.
"""
