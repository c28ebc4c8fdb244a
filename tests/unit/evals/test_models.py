"""A pack in this process as a subject; the demo pack, loaded once."""

import math
import threading
from collections.abc import Iterator

import pytest
from tests.live_server import wait_until

from twinspark.errors import ConfigError, EngineDied, RequestError
from twinspark.evals.models import PackModel, loaded_pack
from twinspark.llm import LLM
from twinspark.messages import Sampling

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def subject() -> Iterator[PackModel]:
    with loaded_pack(None) as model:
        yield model


def ask(subject: PackModel, text: str, max_tokens: int = 60, **fields: object):
    return subject.ask([{"role": "user", "content": text}], fields, max_tokens)


def test_a_plain_greedy_answer(subject: PackModel) -> None:
    answer = ask(subject, "What is the capital of France?", reasoning_effort="none")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with LLM.demo(slots=1) as llm:
        rule = Sampling(temperature=0.0, max_tokens=60, draft=False)
        reply = llm.chat(question, rule, thinking=False)
    assert answer.content == reply.text != ""
    assert (answer.reasoning, answer.finish, answer.calls) == ("", reply.finish_reason, ())
    assert answer.completion_tokens == len(reply.token_ids)
    assert answer.rounds is not None and 1 <= answer.rounds < answer.completion_tokens
    assert answer.reasoning_tokens == 0
    assert (subject.name, subject.place) == ("demo", "demo")


def test_thinking_and_its_tokens(subject: PackModel) -> None:
    answer = ask(subject, "What is 12 + 7?", reasoning_effort="high")
    assert answer.reasoning
    behind = 1 if answer.content else 0  # the closing mark at least
    assert 3 <= answer.reasoning_tokens <= answer.completion_tokens - behind
    cut = ask(subject, "What is 12 + 7?", 3, reasoning_effort="high")
    assert (cut.finish, cut.reasoning_tokens, cut.completion_tokens) == ("length", 3, 3)


def test_calls_have_ids_of_their_own(subject: PackModel) -> None:
    forced = {"tools": [TOOL], "tool_choice": "required", "reasoning_effort": "none"}
    calls = [ask(subject, "Weather in Rome?", 80, **forced).calls[0] for _ in range(2)]
    assert [call.name for call in calls] == ["weather"] * 2
    assert calls[0].arguments == calls[1].arguments
    assert calls[0].call_id != calls[1].call_id


def test_several_threads_get_what_they_would_get_alone(subject: PackModel) -> None:
    questions = ["Who are you?", "Name three colors.", "What does a cat eat?", "Hello!"]
    alone = [ask(subject, text) for text in questions]
    found: dict[int, object] = {}

    def one(number: int) -> None:
        found[number] = ask(subject, questions[number])

    threads = [threading.Thread(target=one, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[n] for n in range(4)] == alone


def test_text_scores_start_behind_the_begin_token(subject: PackModel) -> None:
    text = "def reverse(text):\n    return text[::-1]\n"
    scores = subject.text_scores(text)
    assert len(scores) == subject.count_tokens(text)
    assert all(score <= 0 for score in scores)
    assert math.fsum(scores) > math.fsum(subject.text_scores("zq)(" * 10))


def test_what_the_pack_refuses(subject: PackModel) -> None:
    with pytest.raises(RequestError):
        ask(subject, "Hi", reasoning_effort="very")
    with pytest.raises(RequestError, match="token"):
        ask(subject, "word " * 40000)


def test_a_longer_context_is_taken_where_it_is_needed_and_never_more_than_the_pack_has() -> None:
    with loaded_pack(None, concurrency=1, context_tokens=1 << 20) as model:
        assert model.context_tokens == 32768


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="device"), loaded_pack(None, device="gpu"):
        pass


def test_cancel_ends_what_is_being_asked() -> None:
    with LLM.demo() as llm:
        subject = PackModel(llm, "here")
        caught: list[BaseException] = []

        def one() -> None:
            try:
                ask(subject, "Tell me a long story. " * 20, 20000)
            except EngineDied as error:
                caught.append(error)

        thread = threading.Thread(target=one)
        thread.start()
        wait_until(lambda: llm.status.running > 0, 20)
        subject.cancel()
        thread.join(20)
        assert [str(error) for error in caught] == ["the evaluation was ended"]
        with pytest.raises(EngineDied):
            ask(subject, "Hello!")
        wait_until(lambda: llm.status.running == 0)
