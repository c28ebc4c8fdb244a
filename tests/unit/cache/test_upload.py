"""What is packed for one copy comes out as it went in."""

import torch

from twinspark.cache.layout import CacheLayout
from twinspark.cache.plan import Segment, plan_entries, plan_window
from twinspark.cache.upload import pack_bytes, unpack_bytes, upload, upload_plan

CPU = torch.device("cpu")
LAYOUT = CacheLayout(
    num_slots=2,
    max_tokens=64,
    num_layers=1,
    window=16,
    window_rows=48,
    ring_rows=32,
    page_tokens=16,
)


def test_parts_of_any_shape_and_dtype_come_back():
    tensors = [
        torch.tensor([True, False, True]),
        torch.empty(0, 5, dtype=torch.int64),
        torch.arange(6).view(2, 3),
        torch.tensor([1.5, -2.0]).bfloat16(),
        torch.arange(12).view(3, 4).t(),  # not contiguous
        torch.tensor([7], dtype=torch.int32),
    ]
    buffer = pack_bytes(tensors)
    assert buffer.dtype == torch.uint8
    found = unpack_bytes(buffer, tensors)
    for one, other in zip(found, tensors, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
        assert (one.data_ptr() - buffer.data_ptr()) % 16 == 0 or not one.numel()


def test_plans_of_one_row_can_be_packed():
    """numpy gives arrays of one element any stride."""
    segments = [Segment(1, 33, 1)]
    for plan in (
        plan_window(segments, LAYOUT, [0]),
        plan_entries(segments, LAYOUT, 2),
        plan_entries(segments, LAYOUT, 1),
    ):
        tensors = list(vars(plan).values())
        for one, other in zip(unpack_bytes(pack_bytes(tensors), tensors), tensors, strict=True):
            assert torch.equal(one, other)


def test_nothing_is_copied_on_the_cpu():
    tensors = [torch.arange(3)]
    assert upload(tensors, CPU)[0] is tensors[0]
    plan = plan_entries([Segment(0, 0, 4)], LAYOUT, 2)
    assert upload_plan(plan, CPU) is plan
