"""Router and experts of an MoE layer, on packed EXL3 weights.

Read in order: experts.py (the calls), reference.py, cuda.py, few.py, plan.py, route.cu, decode.cu,
prompt.cu.
"""

from twinspark.kernels.experts.cuda import CudaShardExperts
from twinspark.kernels.experts.experts import (
    ShardExperts,
    begin_experts,
    experts_forward,
    prepare_shard_experts,
    route_rows,
    why_not_packed,
)
from twinspark.kernels.experts.reference import PlainShardExperts

__all__ = [
    "CudaShardExperts",
    "PlainShardExperts",
    "ShardExperts",
    "begin_experts",
    "experts_forward",
    "prepare_shard_experts",
    "route_rows",
    "why_not_packed",
]
