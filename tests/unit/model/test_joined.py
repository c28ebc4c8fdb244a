"""Matrices that take the same rows: what goes together, and the bits of each alone."""

import torch
from tests.kernels.exl3_data import random_matrix

from twinspark.kernels.exl3 import Codebook, prepare_exl3
from twinspark.kernels.exl3.cuda import CudaExl3
from twinspark.kernels.matmul import prepare_matrix
from twinspark.model.joined import JoinedLinears, latent_weights
from twinspark.model.linear import Linear


def packed(outputs: int, bits2: int = 10) -> Linear:
    """A matrix as the CUDA body holds it, without a device."""
    matrix = random_matrix(256, outputs, bits2=bits2)
    return Linear(CudaExl3(matrix.trellis, matrix.suh, matrix.svh, None, Codebook.MUL1))


def decoded(outputs: int) -> Linear:
    return Linear(prepare_exl3(random_matrix(256, outputs)))


def test_products_have_the_bits_of_each_matrix_alone() -> None:
    plain = Linear(prepare_matrix(torch.randn(32, 256).bfloat16(), dtype=torch.float32))
    linears = [decoded(128), plain, decoded(384)]
    joined, x = JoinedLinears(linears), torch.randn(5, 256).bfloat16()
    assert not joined.is_joined
    for y, linear in zip(joined(x), linears, strict=True):
        assert y.dtype == x.dtype and torch.equal(y, linear(x))


def test_what_one_launch_multiplies_by() -> None:
    assert JoinedLinears([packed(128), packed(512)]).is_joined
    assert not JoinedLinears([packed(128)]).is_joined
    assert not JoinedLinears([packed(128), packed(128, bits2=8)]).is_joined
    assert not JoinedLinears([packed(128), decoded(128)]).is_joined


def test_latents_leave_out_what_would_keep_them_apart() -> None:
    norms = (torch.ones(256), torch.ones(512), 1e-20)
    own = [packed(256), packed(512)]
    whole = latent_weights([*own, packed(512), packed(512)], *norms)
    assert whole is not None and len(whole.others) == 2
    for odd in (packed(512, bits2=6), decoded(512)):
        found = latent_weights([*own, packed(512), odd], *norms)
        assert found is not None and found.others == ()
        assert found.queries is own[0].matrix and found.window is own[1].matrix
    plain = Linear(prepare_matrix(torch.randn(512, 256), dtype=torch.float32))
    assert latent_weights([own[0], plain], *norms) is None
