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
    assert not any(field.tensor.any() for field in found)  # nothing is there before it is brought
    staging.part(0, fields.end).bring()
    for number, (field, (dtype, shape)) in enumerate(zip(found, kinds, strict=True)):
        assert field.tensor.dtype == dtype and tuple(field.tensor.shape) == shape
        array = field.tensor.view(torch.int16) if dtype == torch.bfloat16 else field.tensor
        assert np.array_equal(array.numpy(), field.array) and (field.array == number + 1).all()
        assert (field.tensor.data_ptr() - found[0].tensor.data_ptr()) % 16 == 0


def test_a_part_begins_and_ends_where_it_says():
    staging = Staging(256, CPU)
    fields = staging.cut()
    found = [fields.field(torch.int32, 4) for _ in range(3)]
    part = staging.part(16, 32)
    for number, field in enumerate(found):
        field.array[:] = 5 + number
    part.bring()
    assert [field.tensor.tolist() for field in found] == [[0] * 4, [6] * 4, [0] * 4]
    again = staging.cut(32).field(torch.int32, 2)  # fields may lie over each other
    assert again.array.tolist() == [7, 7]


def test_a_field_beyond_the_buffer_is_refused():
    fields = Staging(64, CPU).cut()
    fields.field(torch.float64, 4)
    with pytest.raises(ValueError, match="ends at byte 96 of a buffer of 64"):
        fields.field(torch.float64, 8)


def test_rows_that_are_put_arrive_on_both_sides_and_no_others():
    landing = Landing(4, 2, CPU)
    landing.put(torch.arange(6, dtype=torch.int32).view(3, 2))
    landing.mark()
    landing.wait()
    assert landing.array.tolist() == [[0, 1], [2, 3], [4, 5], [0, 0]]
    assert landing.tensor.tolist() == landing.array.tolist()
    landing.put(torch.zeros(2, 1, dtype=torch.int32).expand(2, 2)[:1])
    assert landing.array[:3].tolist() == [[0, 0], [2, 3], [4, 5]]


def test_only_what_nobody_has_waited_for_is_settled():
    landing, waits = Landing(1, 1, CPU), []
    wait = landing.wait
    landing.wait = lambda: (waits.append(1), wait())
    landing.settle()
    assert not waits
    landing.mark()
    landing.settle()
    landing.settle()
    assert len(waits) == 1
    landing.mark()
    landing.wait()
    landing.settle()
    assert len(waits) == 2
