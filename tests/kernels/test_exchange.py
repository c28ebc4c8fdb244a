"""The one-shot exchange: compiled for both targets, and both ranks' ends on one GPU."""

import pytest
import torch

from twinspark.kernels.cuda.compile import ARCHITECTURES, compile_cubin, why_not_compile
from twinspark.kernels.exchange.one_shot import Mailbox, OneShot, cuda_variants, make_mailbox

ROOM = 64 * 5120 * 2


@pytest.mark.skipif(why_not_compile() is not None, reason="no run-time compiler")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles(arch):
    for source, macros in cuda_variants():
        assert b"exchange_one_shot" in compile_cubin(source, arch=arch, defines=macros)


def test_flags_lie_behind_the_two_buffers():
    assert Mailbox(4096, 160).flags.address == 4096 + 320


@pytest.mark.parametrize("room", [0, 24])
def test_a_mailbox_of_no_vectors_is_refused(room):
    with pytest.raises(ValueError, match="multiple of 16"):
        make_mailbox(torch.device("cuda", 0), room)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6, 24, 64])
def test_both_ends_add_the_same_again_and_again(rows):
    """Two streams of one device stand for two ranks; blocks of both are under way at once."""
    device = torch.device("cuda", 0)
    boxes = [make_mailbox(device, ROOM)[0] for _ in range(2)]
    ends = [OneShot(device, boxes[rank], boxes[1 - rank]) for rank in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    for stream in streams:  # memory of its own: allocating might wait for the first end's blocks
        with torch.cuda.stream(stream):
            torch.empty(ROOM, dtype=torch.uint8, device=device)
    g = torch.Generator(device).manual_seed(rows)
    for _ in range(7):
        parts = torch.randn(2, rows, 5120, device=device, generator=g).bfloat16()
        torch.cuda.synchronize()
        found = []
        for end, stream, part in zip(ends, streams, parts, strict=True):
            with torch.cuda.stream(stream):
                found.append(end.sum(part))
        torch.cuda.synchronize()
        wanted = (parts[0].float() + parts[1].float()).bfloat16()
        assert torch.equal(found[0], wanted) and torch.equal(found[1], wanted)
