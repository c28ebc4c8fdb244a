"""Numbers reach a device from pinned memory, and results pinned memory, with every bit."""

import pytest
import torch

from twinspark.kernels.cuda.compile import ARCHITECTURES, compile_cubin, why_not_compile
from twinspark.kernels.pinned.pinned import bring, cuda_variants, land

# bytes: none, one vector, part of a block, a block, several and a part, as much as a wide round
SIZES = [0, 16, 992, 1024, 16 * 1001, 1 << 18]
SHAPES = [(0, 3), (1, 1), (5, 12), (64, 12), (300, 1)]


def numbers(kind, shape):
    made = torch.Generator().manual_seed(sum(shape))
    return torch.randint(torch.iinfo(kind).min, torch.iinfo(kind).max, shape, dtype=kind,
                         generator=made)  # fmt: skip


def brought(size, device):
    """(what was written, what was found between bytes of 7 on both sides), several times."""
    values = numbers(torch.uint8, (3, size + 32))
    host, found = values[0].clone(), torch.full((size + 32,), 7, dtype=torch.uint8, device=device)
    host = host.pin_memory() if device == "cuda" else host
    for row in values:  # what was read before is not taken for what is there now
        host.copy_(row)
        bring(host[16 : 16 + size], found[16 : 16 + size])
        wanted = torch.full((size + 32,), 7, dtype=torch.uint8)
        wanted[16 : 16 + size] = row[16 : 16 + size]
        yield wanted, found.cpu()


def landed(shape, device):
    """(results, where a device reads them, where the host does), with a row of 0 behind."""
    values = torch.zeros(shape[0] + 1, shape[1], dtype=torch.int32)
    values[:-1] = numbers(torch.int32, shape)
    there, here = torch.zeros_like(values, device=device), torch.zeros_like(values)
    here = here.pin_memory() if device == "cuda" else here
    land(values.to(device)[:-1], there[:-1], here[:-1])
    if device == "cuda":
        torch.cuda.synchronize()
    return values, there.cpu(), here


@pytest.mark.parametrize("size", SIZES)
def test_all_bytes_are_brought_and_nothing_beside_them(size):
    assert all(torch.equal(wanted, found) for wanted, found in brought(size, "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_a_device_reads_the_same_bytes(size):
    assert all(torch.equal(wanted, found) for wanted, found in brought(size, "cuda"))


@pytest.mark.parametrize("shape", SHAPES)
def test_results_land_in_both_places(shape):
    values, there, here = landed(shape, "cpu")
    assert torch.equal(there, values) and torch.equal(here, values)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_a_device_writes_the_same_results(shape):
    values, there, here = landed(shape, "cuda")
    assert torch.equal(there, values) and torch.equal(here, values)


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
