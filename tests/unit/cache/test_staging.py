"""Numbers written in place arrive where the device reads them, and results where the host does."""

import numpy as np
import pytest
import torch

from twinspark.cache.staging import Landing, Staging

CPU = torch.device("cpu")


def test_fields_of_any_type_arrive_and_share_no_byte():
    staging = Staging(1024, CPU)
    fields = staging.cut()
    kinds = [
        (torch.int32, (3,)), (torch.float64, (2,)), (torch.bfloat16, (2, 5)), (torch.uint8, (7,)),
        (torch.float32, (1,)), (torch.int32, (4, 3)),
    ]  # fmt: skip
    found = [fields.field(dtype, *shape) for dtype, shape in kinds]
    for number, field in enumerate(found):
        field.array[...] = number + 1
    assert not any(field.tensor.any() for field in found)  # nothing is there before it is sent
    staging.part(fields.end).send()
    for number, (field, (dtype, shape)) in enumerate(zip(found, kinds, strict=True)):
        assert field.tensor.dtype == dtype and tuple(field.tensor.shape) == shape
        array = field.tensor.view(torch.int16) if dtype == torch.bfloat16 else field.tensor
        assert np.array_equal(array.numpy(), field.array) and (field.array == number + 1).all()
        assert (field.tensor.data_ptr() - found[0].tensor.data_ptr()) % 16 == 0


def test_a_part_ends_where_it_says():
    staging = Staging(256, CPU)
    fields = staging.cut()
    first = fields.field(torch.int32, 4)
    part = staging.part(fields.end)
    behind = fields.field(torch.int32, 4)
    first.array[:], behind.array[:] = 5, 6
    part.send()
    assert first.tensor.tolist() == [5] * 4 and behind.tensor.tolist() == [0] * 4
    again = staging.cut(part.host.numel()).field(torch.int32, 2)  # fields may lie over each other
    assert again.array.tolist() == [6, 6]


def test_a_field_beyond_the_buffer_is_refused():
    fields = Staging(64, CPU).cut()
    fields.field(torch.float64, 4)
    with pytest.raises(ValueError, match="ends at byte 96 of a buffer of 64"):
        fields.field(torch.float64, 8)


@pytest.mark.parametrize("aside", [False, True])
def test_rows_that_are_fetched_arrive_and_no_others(aside):
    landing = Landing(4, 2, CPU)
    landing.tensor.copy_(torch.arange(8).view(4, 2))
    landing.fetch(3, aside=aside)
    landing.wait()
    assert landing.array.tolist() == [[0, 1], [2, 3], [4, 5], [0, 0]]
    landing.tensor.zero_()
    landing.fetch(1)
    landing.wait()
    assert landing.array[:3].tolist() == [[0, 0], [2, 3], [4, 5]]
