"""Numbers reach a device from pinned memory, and results pinned memory, with every bit."""

import pytest
import torch

from twinspark.kernels.cuda.compile import ARCHITECTURES, compile_cubin, why_not_compile
from twinspark.kernels.pinned.pinned import bring, cuda_variants, land

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# bytes: none, one vector, part of a block, a block, several and a part, as much as a wide round
SIZES = [0, 16, 992, 1024, 16 * 1001, 1 << 18]


def pinned(tensor, device):
    return tensor.pin_memory() if device == "cuda" else tensor


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES)
def test_all_bytes_are_brought_and_nothing_beside_them(size, device):
    made = torch.Generator().manual_seed(size)
    host = pinned(torch.randint(0, 256, (size + 32,), dtype=torch.uint8, generator=made), device)
    found = torch.full((size + 32,), 7, dtype=torch.uint8, device=device)
    for _ in range(3):  # what was read before is not taken for what is there now
        host.copy_(torch.randint(0, 256, (size + 32,), dtype=torch.uint8, generator=made))
        bring(host[16 : 16 + size], found[16 : 16 + size])
        assert torch.equal(found[16 : 16 + size].cpu(), host[16 : 16 + size])
        assert (found[:16] == 7).all() and (found[16 + size :] == 7).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5, 12), (64, 12), (300, 1)])
def test_results_land_in_both_places(shape, device):
    made = torch.Generator().manual_seed(shape[0])
    values = torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32, generator=made)
    there = torch.zeros(shape[0] + 1, shape[1], dtype=torch.int32, device=device)
    here = pinned(torch.zeros(shape[0] + 1, shape[1], dtype=torch.int32), device)
    land(values.to(device), there[:-1], here[:-1])
    if device == "cuda":
        torch.cuda.synchronize()
    for found in (there.cpu(), here):
        assert torch.equal(found[:-1], values) and not found[-1].any()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="as many bytes here as there"):
        bring(torch.zeros(32, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8))
    with pytest.raises(ValueError, match="as many bytes here as there"):
        bring(torch.zeros(16, dtype=torch.int32), torch.zeros(16, dtype=torch.uint8))
    ints = torch.zeros(4, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="device must be contiguous int32"):
        land(ints, torch.zeros(2, 4, dtype=torch.int32).T, ints.clone())
    with pytest.raises(ValueError, match="host must be contiguous int32"):
        land(ints, ints.clone(), torch.zeros(3, 2, dtype=torch.int32))


@pytest.mark.skipif(why_not_compile() is not None, reason="no run-time compiler")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles(arch):
    for source, macros in cuda_variants():
        assert compile_cubin(source, arch=arch, defines=macros)
