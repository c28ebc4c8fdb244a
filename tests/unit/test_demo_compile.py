"""Every op that training compiles is traceable as one graph, and a compiled step computes the same.

Code generation is for the GPU; here graphs run as they were traced (aot_eager).
"""

import functools

import pytest
import torch
from tests.unit.test_demo_train import PLAN, config, data, trainer  # noqa: F401
from tools.demo import ops


@pytest.mark.filterwarnings("ignore")  # dynamo's own
def test_a_traced_step_computes_what_the_plain_one_does(config, data, monkeypatch):  # noqa: F811
    made = trainer(config, data)
    form = PLAN.form(256, dense=False)
    made.prepare(form)
    made.feed(form)
    plain, parts, _ = made.losses(form, made.inputs[form])
    plain.backward()
    wanted = {n: p.grad.clone() for n, p in made.twin.params.items() if p.grad is not None}
    made.optimizer.clear()
    traced = []

    def compiled(fn, dynamic):
        traced.append(fn.__name__)
        return original(fn, backend="aot_eager", fullgraph=True, dynamic=dynamic)

    original = torch.compile
    monkeypatch.setattr(torch, "compile", functools.partial(compiled))
    monkeypatch.setattr(ops.switch, "compiled", True)
    total, found, _ = made.losses(form, made.inputs[form])
    total.backward()
    assert {"hc_enter", "hc_expand", "route", "softmax_two", "index_loss"} <= set(traced)
    for one, other in zip(found, parts, strict=True):
        assert one.item() == pytest.approx(other.item(), rel=2e-2)
    got = {n: p.grad for n, p in made.twin.params.items() if p.grad is not None}
    assert set(got) == set(wanted)
    cosine = torch.nn.functional.cosine_similarity
    big = [n for n, g in wanted.items() if g.norm() > 1e-3]
    near = [cosine(got[n].flatten().float(), wanted[n].flatten().float(), 0).item() for n in big]
    assert sum(near) / len(near) > 0.98
