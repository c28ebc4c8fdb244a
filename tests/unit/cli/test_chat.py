"""The terminal chat on a fake model: what goes where, commands, Ctrl-C, Ctrl-D."""

import os
import signal
import threading
import time

import pytest
import typer
from tests.fake_model import FakeModel

from twinspark import LLM, Sampling
from twinspark.cli.chat import ChatSession, answer_once, run_terminal
from twinspark.config.engine import EngineConfig
from twinspark.engine.core import Engine
from twinspark.engine.startup import LoadedEngine

RULE = Sampling(temperature=0.9, seed=7, max_tokens=20)


class SlowModel(FakeModel):
    def forward(self, step, caches):
        time.sleep(0.01)
        return super().forward(step, caches)


@pytest.fixture
def make_session(small_tokenizer):
    def make(sampling=RULE, *, thinking=False, model=None):
        config = EngineConfig(slots=1, max_context_tokens=2048)
        loaded = LoadedEngine(
            engine=Engine(model or FakeModel(), small_tokenizer, config),
            tokenizer=small_tokenizer,
            model_name="fake",
            load_seconds=0.0,
        )
        return ChatSession(LLM.from_engine(loaded), sampling, thinking=thinking)

    return make


def test_once_writes_the_reply_alone_to_stdout(make_session, capsys):
    session = make_session()
    expected = session.llm.chat([{"role": "user", "content": "Hi"}], RULE, thinking=False)
    answer_once(session, "Hi")
    out, err = capsys.readouterr()
    assert out == expected.text + "\n"
    assert "seed 7" in err and "tokens/s" in err


def test_reasoning_goes_to_stderr(make_session, capsys, small_tokenizer):
    model = FakeModel(end_id=small_tokenizer.end_think_id, end_bias=6.0)
    rule = Sampling(temperature=0.9, seed=3, max_tokens=60, ignore_eos=True)
    session = make_session(rule, thinking=True, model=model)
    reply = session.ask("Hi")
    out, err = capsys.readouterr()
    assert reply.reasoning and reply.text
    assert out == reply.text + "\n" and reply.reasoning in err


def test_the_conversation_is_remembered_until_reset(make_session):
    session = make_session()
    first = session.ask("One")
    session.ask("Two")
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * 2
    assert session.messages[1]["content"] == first.text
    assert "forgotten" in session.command("/reset") and session.messages == []
    assert session.ask("One").token_ids == first.token_ids


def test_commands_change_how_replies_are_made(make_session):
    session = make_session()
    session.command("/seed 9")
    session.command("/temperature 0.5")
    session.command("/max-tokens 3")
    session.command("/think on")
    assert session.sampling == Sampling(temperature=0.5, seed=9, max_tokens=3)
    assert session.thinking is True
    session.command("/seed off")
    session.command("/max-tokens off")
    session.command("/think off")
    assert session.sampling == Sampling(temperature=0.5) and session.thinking is False
    assert "/reset" in session.command("/help")


@pytest.mark.parametrize(
    "line", ["/seed x", "/temperature x", "/think maybe", "/temperature", "/what", "/"]
)
def test_wrong_commands_say_where_help_is(line, make_session):
    session = make_session()
    assert "/help" in session.command(line) and session.sampling == RULE


@pytest.mark.parametrize("line", ["/temperature nan", "/temperature -1", "/max-tokens 0"])
def test_numbers_out_of_range_are_refused_when_set(line, make_session):
    session = make_session()
    assert "expected" in session.command(line) and session.sampling == RULE


def interrupt_soon():
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_ctrl_c_stops_the_reply_and_not_the_program(make_session, capsys):
    session = make_session(Sampling(seed=1, ignore_eos=True), model=SlowModel())
    before = signal.getsignal(signal.SIGINT)
    interrupt_soon()
    reply = session.ask("Hi")
    assert reply.finish_reason == "cancelled"
    assert 0 < len(reply.token_ids) < 1000
    assert capsys.readouterr().out == reply.text + "\n"
    assert signal.getsignal(signal.SIGINT) is before
    session.sampling = RULE
    assert session.ask("Again").finish_reason != "cancelled"


def test_ctrl_c_with_once_ends_with_its_code(make_session, capsys):
    session = make_session(Sampling(seed=1, ignore_eos=True), model=SlowModel())
    interrupt_soon()
    with pytest.raises(typer.Exit) as caught:
        answer_once(session, "Hi")
    assert caught.value.exit_code == 130


def test_the_terminal_loop(make_session, capsys, monkeypatch):
    lines = iter(["", "/seed 7", KeyboardInterrupt, "x" * 9000, "Hi", EOFError])

    def fake_input(prompt):
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", fake_input)
    session = make_session()
    run_terminal(session)
    out, err = capsys.readouterr()
    assert session.messages[1]["content"] in out
    assert len(session.messages) == 2
    assert "seed is 7" in err and "Ctrl-D" in err and "context holds 2048" in err
    assert "/reset forgets" in err
