"""Windows of many rows: what a launch reads is still there, whatever shares its memory; bits."""

import pytest
import torch
from tests.kernels.test_experts import LIMIT, routing, rows_of, shard_matrices
from torch import Tensor

from twinspark.kernels.exl3 import Exl3Matrix
from twinspark.kernels.experts import cuda, experts_forward, plan, prepare_shard_experts
from twinspark.kernels.experts.plan import plan_prompt, window_bounds


class Launches:
    """Fills what a launch would write with the number of its window, and checks what it reads."""

    def __init__(self, window: int, hidden: int) -> None:
        """Nothing was launched; windows have so many rows, outputs so many columns."""
        self.window = window
        self.hidden = hidden
        self.names: list[str] = []
        self.added: list[tuple[int, int]] = []

    def launch(self, name: str, grid: object, threads: int, args: tuple, **more: int) -> None:
        """As that of CudaModule."""
        self.names.append(name)
        if name == "experts_rotate":
            for written in args[5:7]:
                written.fill_(1 + args[9] // args[10])
        elif name == "experts_tiles":
            *_, x0, x1, y, inputs, outputs, is_hidden, first_row, rows = args
            number = 1 + first_row // rows
            assert x0.min() == x1.min() == x0.max() == x1.max() == number
            assert x0.numel() == rows * inputs and y.numel() == (1 + is_hidden) * rows * outputs
            y.fill_(10 * number)
        elif name == "experts_act_tiled":
            number = 1 + args[10] // args[11]
            assert args[1].min() == args[1].max() == 10 * number
            args[6].fill_(number)
        elif name == "experts_add":
            self.add(args)

    def add(self, args: tuple) -> None:
        """Each window's outputs are there, and a sum of those before where there are any."""
        y, total, first_row, added_rows, is_last = args[1], args[4], *args[9:12]
        parts = y.view(-1)[: added_rows * self.hidden].view(-1, self.window * self.hidden)
        for i, part in enumerate(parts):
            assert part.min() == part.max() == 10 * (1 + first_row // self.window + i)
        assert total is not None or (first_row == 0 and is_last)
        self.added.append((first_row, added_rows))


@pytest.mark.parametrize(("windows", "added"), [(1, 2), (2, 2), (3, 2), (4, 2), (2, 1), (5, 3)])
@pytest.mark.parametrize("widths", [(128,), (640, 640)])
def test_launches_find_what_they_read(
    windows: int, added: int, widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    num, hidden, experts, active = 100, 256, 12, 4
    most = window_bounds(num, active, experts, 80)
    assert most[0] == 1
    monkeypatch.setattr(plan, "WINDOW_ROWS", -(-most[1] // (8 * windows)) * 8)
    monkeypatch.setattr(cuda, "ADDED_WINDOWS", added)
    launches = Launches(window_bounds(num, active, experts, 80)[1], hidden)
    monkeypatch.setattr(cuda, "_prompt_plan", lambda _: plan_prompt(232448, wgmma=True))
    monkeypatch.setattr(cuda, "module_of", lambda *_: launches)
    table = torch.zeros(experts + 1, 3, 4, dtype=torch.int64)
    shards = [
        cuda.CudaShardExperts(table, (), experts, hidden, width, LIMIT, 3, 3, 1) for width in widths
    ]
    x, (ids, weights) = rows_of(num, hidden), routing(num, active, experts)
    out = torch.empty(len(shards), num, hidden, dtype=torch.bfloat16)
    cuda._Prompt(x, ids, weights, None, shards).run(out)
    assert launches.names.count("experts_tiles") == 2 * windows * len(shards)
    covered = [first for first, rows in launches.added for first in range(first, first + rows)]
    assert covered == list(range(windows * launches.window)) * len(shards)
    assert len(launches.added) == -(-windows // added) * len(shards)


@pytest.mark.gpu
def test_windows_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = shard_matrices(640, 384, 12)
    moved = [
        [Exl3Matrix(m.trellis.cuda(), m.suh.cuda(), m.svh.cuda(), m.codebook) for m in one]
        for one in lists
    ]
    shards = [prepare_shard_experts(*moved, limit=LIMIT)]
    x, (ids, weights) = rows_of(300, 640), routing(300, 4, 12)
    given = (x.cuda(), ids.cuda(), weights.cuda(), torch.rand(300, 4).cuda() < 0.8)

    def call() -> Tensor:
        return experts_forward(*given, shards)

    usual = call()
    for rows in (1000, 304, 104):
        for added in (1, 2, 3):
            monkeypatch.setattr(plan, "WINDOW_ROWS", rows)
            monkeypatch.setattr(cuda, "ADDED_WINDOWS", added)
            assert torch.equal(call(), usual), (rows, added)
            with monkeypatch.context() as patched:  # by a cluster, too
                patched.setattr(cuda, "plan_group", lambda *_, **__: ("experts_group_together", 8))
                assert torch.equal(call(), usual), (rows, added)
    for each in (1, 2, 3, 4):
        monkeypatch.setattr(cuda, "pieces_each", lambda _, each=each: each)
        assert torch.equal(call(), usual), each
