"""Steps that become CUDA graphs must never wait for the device: no value may travel to the host."""

import pytest
import torch
from tests.unit.test_demo_long import made_twin
from tools.demo.decode import Decoder
from tools.demo.finds import finds_of
from tools.demo.train_draft import Cached, _losses, cache_targets
from torch.profiler import ProfilerActivity, profile

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal"}


def waits(step):
    """Names of the ops of step() that copy a value to the host.

    The profiler sees what a dispatch mode does not: formulas of the backward pass that ask for a
    value do so in another way while a mode is on.
    """
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    found = seen.profiler.kineto_results.events()  # raw: `events()` takes seconds to make trees
    return sorted({e.name() for e in found} & {f"aten::{name}" for name in WAITS})


def test_the_check_sees_a_wait():
    assert waits(lambda: torch.arange(3)[torch.tensor(1)]) == ["aten::_local_scalar_dense"]
    x = torch.rand(2, 3, requires_grad=True)
    assert waits(lambda: x.prod(-1).sum().backward()) == ["aten::_local_scalar_dense"]


@pytest.mark.parametrize(
    "form", [{"dense": True}, {}, {"long": True}, {"long": True, "recompute": True}], ids=str
)
def test_a_training_step_never_waits(form):
    twin = made_twin()
    twin.params = {n: p.float().requires_grad_("mtp" not in n) for n, p in twin.params.items()}
    ids = torch.randint(3, 498, (2, 33), generator=torch.Generator().manual_seed(3))
    find = torch.full((2, 32), -1)
    find[:, 20] = 4

    def step():
        state = twin.start(ids[:, :-1], leak=0.3, finds=finds_of(find, 8), **form)
        h = twin.hidden(ids[:, :-1], state)
        losses = [*state.index_losses, *state.find_losses, *state.copy_losses]
        (h.float().sum() + torch.stack(losses).sum()).backward()

    assert waits(step) == []


def test_a_decoding_step_never_waits():
    twin = made_twin()
    decoder = Decoder(twin, 2, 12)
    decoder.start()
    assert waits(lambda: (decoder.step(), decoder.step())) == []


def test_a_draft_step_never_waits():
    twin = made_twin()
    twin.params = {n: p.float().requires_grad_("mtp" in n) for n, p in twin.params.items()}
    ids = torch.randint(3, 498, (2, 32), generator=torch.Generator().manual_seed(3))
    found: Cached = cache_targets(twin, ids, 2)
    starts = torch.tensor([[3, 9], [4, 20]])
    state = twin.start(ids)
    state.taps = [found.taps.flatten(0, 1)]

    def step():
        loss, doubt, _ = _losses(twin, ids, found.hidden, starts, state)
        (loss + doubt).backward()

    assert waits(step) == []
