"""Row invariance of an op: the check that every test file of a row-wise op runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Op = Callable[..., Tensor | tuple[Tensor, ...]]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_rows_stand_alone(op: Op, *inputs: Tensor, counts: tuple[int, ...] = ()) -> None:
    """The bits of a row must not depend on the call's other rows, their number or the threads.

    Args:
        op: takes tensors with the row axis first and returns tensors with the row axis first.
        inputs: 40 rows of each argument.
        counts: row counts to try instead of the usual ones.
    """
    num = len(inputs[0])
    with threads(1):
        alone = [_tuple(op(*(x[i : i + 1] for x in inputs))) for i in range(num)]
    expected = [torch.cat(rows) for rows in zip(*alone, strict=True)]
    order = torch.randperm(num, generator=torch.Generator().manual_seed(num))
    for number in (1, 2):
        with threads(number):
            for count in counts or (1, 2, 3, 5, 6, 7, 8, 9, 12, 16, 17, 24, 31, num):
                for first in {0, (num - count) // 2, num - count}:
                    where = slice(first, first + count)
                    got = _tuple(op(*(x[where] for x in inputs)))
                    _compare(got, [e[where] for e in expected], f"{count} rows, {number} threads")
            got = _tuple(op(*(x[order] for x in inputs)))
            _compare(got, [e[order] for e in expected], f"shuffled, {number} threads")


def _tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _compare(got: tuple[Tensor, ...], expected: list[Tensor], case: str) -> None:
    for number, (g, e) in enumerate(zip(got, expected, strict=True)):
        assert g.is_contiguous(), f"{case}: result {number} is not contiguous"
        assert g.dtype == e.dtype and torch.equal(g, e), f"{case}: result {number} differs"
