"""Logits on their way to the host: a round of one pass copies none of them."""

import torch

from twinspark.engine.runner import _one_on_host


def test_one_part_is_shared_and_several_follow_each_other():
    first, second = torch.randn(2, 5), torch.randn(1, 5)
    alone = _one_on_host([first])
    assert alone.ctypes.data == first.data_ptr()
    both = _one_on_host([first, second])
    assert torch.equal(torch.from_numpy(both), torch.cat([first, second]))
