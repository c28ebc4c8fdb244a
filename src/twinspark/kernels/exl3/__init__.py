"""EXL3 weights: codebooks, tile decoding, rotation and the linear layer (EXL3 specification).

Owns the arithmetic of one matrix. Reading packs is `pack/`, making weights is `quantize/`.
Read in order: codebook.py, decode.py, hadamard.py, linear.py, grouped.py, shards.py.
"""

from twinspark.kernels.exl3.codebook import Codebook, codebook_table
from twinspark.kernels.exl3.decode import decode_matrix, decode_tiles, pack_states, unpack_states
from twinspark.kernels.exl3.grouped import PreparedExperts, exl3_grouped, prepare_experts
from twinspark.kernels.exl3.hadamard import hadamard128
from twinspark.kernels.exl3.linear import (
    Exl3Matrix,
    PreparedExl3,
    dense_weight,
    exl3_linear,
    prepare_exl3,
)
from twinspark.kernels.exl3.shards import exl3_shards

__all__ = [
    "Codebook",
    "Exl3Matrix",
    "PreparedExl3",
    "PreparedExperts",
    "codebook_table",
    "decode_matrix",
    "decode_tiles",
    "dense_weight",
    "exl3_grouped",
    "exl3_linear",
    "exl3_shards",
    "hadamard128",
    "pack_states",
    "prepare_exl3",
    "prepare_experts",
    "unpack_states",
]
