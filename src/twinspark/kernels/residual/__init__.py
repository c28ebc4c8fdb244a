"""The residual boundary: everything between two sublayers in one call (model specification 3.2).

New streams from a sublayer's output, the next site's mixing weights, and the next sublayer's
normed input. Read in order: boundary.py (the op and its plain body), cuda.py, common.cuh,
streams.cu, mix.cu; of many rows rows.cu, tiles.cu.
"""

from twinspark.kernels.residual.boundary import boundary, prepare_site
from twinspark.kernels.residual.site import Boundary, Ran, Site

__all__ = ["Boundary", "Ran", "Site", "boundary", "prepare_site"]
