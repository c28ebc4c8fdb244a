"""What attention takes of its input in one go: query latents, window rows, compressor products.

Read in order: latents.py, finish.cu, `kernels/exl3/joined.py`.
"""

from twinspark.kernels.latents.latents import Latents, LatentWeights, latents

__all__ = ["LatentWeights", "Latents", "latents"]
