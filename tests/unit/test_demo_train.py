"""The demo's trainer: resuming is exact, memory and bad steps are survived, the plan adds up."""

import pytest
import torch
from tools.demo import curriculum, rehearsal, train
from tools.demo.backbone import Backbone, Options, Pace, answer_weights, target_weights
from tools.demo.batches import Batches
from tools.demo.config import engram_primes
from tools.demo.curriculum import Form, Plan
from tools.demo.init import initial
from tools.demo.twin import Twin

QUIET = Options(log_every=1, save_seconds=1e9)
STEPS = 6


@pytest.fixture(scope="module")
def config():
    made = rehearsal.small_config()
    made["text_config"] |= {"moe_intermediate_size": 32, "engram_n_heads": 1}
    made["text_config"]["engram_num_embeddings"] = [
        sum(p) for p in engram_primes(made["text_config"])
    ]
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rehearsal.write_data(
        folder, {"chat": (12, 60), "code": (4, 300), "needle4k": (6, 200), "needle16k": (4, 250)}
    )
    return folder


PLAN = Plan(
    tokens=256,
    shares=((64, {"chat": 0.5, "code": 0.5}), (256, {"needle4k": 0.6, "needle16k": 0.4})),
    stages=((0.5, {64: 1.0}), (1.0, {64: 0.4, 256: 0.6})),
    long_from=128,
    finds=32,
)


def trainer(config, data, plan=PLAN, options=QUIET, log=None):
    twin = Twin(config, torch.arange(4096) % config["text_config"]["engram_compressed_vocab_size"])
    twin.params = initial(config)
    made = Backbone(twin, plan, options, log or (lambda kind, **values: None))
    made.use(Batches(data, "train", "cpu", 3), plan)
    return made


def everything(made):
    """All that training changes, as one list of tensors."""
    state = made.optimizer.state()
    adam = [t for one in state["adam"] for t in one.values()]
    pairs = [t for pair in state["muon"] for t in pair]
    return [*made.twin.params.values(), *pairs, *state["rest"], *adam]


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(config, data, tmp_path):
    whole = trainer(config, data)
    assert whole.train(Pace(1.0, steps=STEPS), tmp_path / "whole.pt")
    first = trainer(config, data)
    assert not first.train(Pace(1.0, steps=STEPS, stop_after=4), tmp_path / "state.pt")
    second = trainer(config, data)
    second.restore(tmp_path / "state.pt")
    assert second.at.step == 4
    assert second.train(Pace(1.0, steps=STEPS), tmp_path / "state.pt")
    assert vars(second.at) | {"seconds": 0} == vars(whole.at) | {"seconds": 0}
    assert second.batches.state() == whole.batches.state()
    for one, other in zip(everything(second), everything(whole), strict=True):
        assert torch.equal(one, other)
    # and it was training: another run of one step more differs
    assert any(
        not torch.equal(a, b) for a, b in zip(everything(first), everything(whole), strict=True)
    )


def test_a_run_that_began_from_a_checkpoint_resumes_on_its_own_data_and_rate(
    config, data, tmp_path
):
    first = trainer(config, data)
    first.at.step, first.at.seed, first.at.fresh_from = 40, 52, 40
    first.train(Pace(1.0, steps=STEPS + 40, stop_after=1), tmp_path / "state.pt")
    second = trainer(config, data)
    second.restore(tmp_path / "state.pt")
    assert (second.at.step, second.at.seed, second.at.fresh_from) == (41, 52, 40)


def test_steps_without_a_checkpoint_are_refused(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train", "backbone", "DEMO", "--out", "OUT", "--step", "3"])
    with pytest.raises(SystemExit, match="give its folder"):
        train.main()


def test_too_little_memory_makes_the_form_smaller_and_training_goes_on(config, data, tmp_path):
    said = []
    made = trainer(config, data, log=lambda kind, **values: said.append((kind, values)))
    real = made.step

    def step(form):
        if form.length == 256 and not form.recompute or form.length == 64 and form.batch > 2:
            raise torch.OutOfMemoryError("pretended")
        return real(form)

    made.step = step
    assert made.train(Pace(1.0, steps=4), tmp_path / "state.pt")
    assert made.fitted(Form(64, 4)) == Form(64, 2)
    assert made.fitted(Form(256, 1, long=True)) == Form(256, 1, long=True, recompute=True)
    assert [k for k, _ in said].count("out_of_memory") == 3  # 64 dense, 64, 256
    made.smaller.clear()
    made.inputs.clear()
    made.step = lambda form: (_ for _ in ()).throw(torch.OutOfMemoryError("always"))
    with pytest.raises(torch.OutOfMemoryError):
        made.run(Form(64, 4))


def test_a_step_that_is_not_finite_goes_back_to_the_saved_run(config, data, tmp_path):
    made = trainer(config, data)
    made.train(Pace(1.0, steps=STEPS, stop_after=2), tmp_path / "state.pt")
    saved = [t.clone() for t in everything(made)]
    made.inputs.clear()  # so that the step below is used
    real, calls = made.step, []

    def step(form):
        calls.append(form)
        result = real(form)
        return result * float("nan") if len(calls) == 1 else result

    made.step = step
    drawn = made.batches.state()
    made.train(Pace(1.0, steps=STEPS, stop_after=1), tmp_path / "state.pt")
    assert made.at.faults == 1 and made.at.step == 3 and len(calls) == 2
    assert made.batches.state() != drawn
    assert any(not torch.equal(a, b) for a, b in zip(everything(made), saved, strict=True))
    assert all(t.isfinite().all() for t in everything(made))
    made.inputs.clear()
    made.step = lambda form: torch.full((5,), float("nan"))
    with pytest.raises(FloatingPointError):
        made.train(Pace(1.0, steps=STEPS), tmp_path / "state.pt")
    with pytest.raises(FileNotFoundError, match="without --resume"):
        made.restore(tmp_path / "other.pt")


def test_a_bad_first_step_starts_again_at_half_the_rate(config, data, tmp_path):
    made = trainer(config, data)
    began = [p.detach().clone() for p in made.twin.params.values()]
    real, calls = made.step, []

    def step(form):
        calls.append(made.factor.item())
        result = real(form)
        if len(calls) == 1:
            for value in everything(made):  # what a step that is not finite leaves behind
                value.data.fill_(float("nan")) if value.is_floating_point() else None
            return result * float("nan")
        if len(calls) == 2:
            assert all(t.isfinite().all() for t in everything(made))
        return result

    made.step = step
    made.train(Pace(1.0, steps=STEPS, stop_after=1), tmp_path / "state.pt")
    assert made.at.faults == 1 and len(calls) == 2
    assert calls[1] == pytest.approx(calls[0] / 2)
    moved = [not torch.equal(a, b) for a, b in zip(made.twin.params.values(), began, strict=True)]
    assert any(moved)


def test_a_large_norm_is_no_fault(config, data, tmp_path):
    made = trainer(config, data)
    real = made.step
    made.step = lambda form: real(form) + torch.tensor([0.0, 0, 0, 0, 1e5])
    assert made.train(Pace(1.0, steps=2), tmp_path / "state.pt")
    assert made.at.faults == 0


def test_finish_leaves_plain_parameters_of_the_same_values(config, data, tmp_path):
    made = trainer(config, data)
    made.train(Pace(1.0, steps=2), tmp_path / "state.pt")
    leaves = {n: p.detach().clone() for n, p in made.twin.params.items()}
    made.finish()
    for name, value in made.twin.params.items():
        assert value.dtype == torch.float32 and not value.requires_grad, name
        assert torch.equal(value.to(leaves[name].dtype), leaves[name]), name


def test_sources_with_too_little_text_are_left_out(config, tmp_path):
    rehearsal.write_data(tmp_path, {"chat": (12, 60), "code": (2, 30), "needle4k": (6, 200)})
    said = []
    made = trainer(config, tmp_path, log=lambda kind, **values: said.append((kind, values)))
    state = made.batches.state()
    made.use(made.batches, PLAN, PLAN.forms(0.0, 0.4))
    assert made.plan.sources(64) == {"chat": 0.5}
    assert [(k, v["source"]) for k, v in said] == [("left_out", "code")]
    assert made.batches.state() == state
    with pytest.raises(ValueError, match="windows of 256"):
        made.use(made.batches, Plan(shares=((256, {"code": 1.0}),)), [Form(256, 1)])


def test_copied_targets_weigh_more_and_context_a_little():
    ids = torch.tensor([[7, 8, 9, 0, 2]])
    loss, find = torch.tensor([[1, 0, 1, 0, 0]]), torch.tensor([[-1, 4, 4, -1, -1]])
    for source, more in ((0, curriculum.ANSWER_WEIGHT), (4, curriculum.ANSWER_WEIGHTS["tasks"])):
        answer = answer_weights(torch.tensor([source]))
        wanted = [1.0, curriculum.CONTEXT_WEIGHT, 1.0 + more, 0.0, 0.0]
        assert target_weights(ids, loss, find, answer)[0].tolist() == pytest.approx(wanted)


def test_the_real_plan_uses_every_source_and_its_forms_hold_the_same_tokens():
    plan = Plan()
    names = {n for _, mix in plan.shares for n in mix}
    assert names == set(curriculum.SOURCES)
    assert plan.forms(0.0, 1.0) == [
        Form(2048, 16, dense=True), Form(2048, 16), Form(8192, 4, long=True),
        Form(32768, 1, long=True),
    ]  # fmt: skip
    assert plan.forms(0.0, 0.4) == [Form(2048, 16, dense=True), Form(2048, 16)]
    assert plan.forms(0.7, 1.0)[-1] == Form(32768, 1, long=True)
    assert Form(2048, 16) in plan.forms(0.7, 1.0)


def test_lengths_come_in_their_shares():
    credit, counts = {}, {2048: 0, 8192: 0, 32768: 0}
    mix = {2048: 0.4, 8192: 0.3, 32768: 0.3}
    for _ in range(100):
        counts[curriculum.next_length(credit, mix)] += 1
    assert counts == {2048: 40, 8192: 30, 32768: 30}
    assert curriculum.next_length(credit, {2048: 1.0}) == 2048
    assert set(credit) == {2048}


def test_the_rate_rises_holds_and_ends_low():
    rates = [curriculum.rate_factor(5000, p) for p in (0.0, 0.4, 0.7, 1.0)]
    assert rates == pytest.approx([1.0, 1.0, 0.5, curriculum.LOWEST])
    assert curriculum.rate_factor(0, 0.0) < 0.01
