from typing import Any

import pytest
from tests.fake_api import MODELS, FakeApi, FakeReply, chat_reply, fake_api, not_there

from twinspark.errors import CapacityError, ConfigError, RequestError
from twinspark.evals.case import NOT_MEASURABLE, Answer, Call
from twinspark.evals.http_client import HttpClient
from twinspark.evals.servers import PROBE_CHARS, ServerModel


def with_models(path: str, body: Any, reply: FakeReply) -> FakeReply:
    return FakeReply(MODELS) if path == "/v1/models" else reply


def model_of(api: FakeApi, *, path: str = "/v1", model: str | None = None) -> ServerModel:
    return ServerModel(HttpClient(api.url + path), model=model)


@pytest.mark.parametrize("path", ["/v1", "", "/", "/v1/"])
def test_the_address_may_end_before_or_behind_v1(path: str) -> None:
    with fake_api(lambda path, body: with_models(path, body, not_there(path))) as api:
        subject = model_of(api, path=path)
        assert (subject.name, subject.context_tokens) == ("first", None)
        assert model_of(api, path=path, model="second").context_tokens == 4096


@pytest.mark.parametrize(
    "reply",
    [
        FakeReply(b"<html>hello</html>"), FakeReply({"hello": 1}), FakeReply([1]),
        FakeReply({"error": {"message": "nothing"}}, status=404), FakeReply({}, status=503),
    ],
)  # fmt: skip
def test_what_is_no_such_server(reply: FakeReply) -> None:
    with fake_api(lambda path, body: reply) as api:
        with pytest.raises(ConfigError, match="no OpenAI-compatible server"):
            model_of(api)


def test_nothing_listens_there() -> None:
    with fake_api(lambda path, body: FakeReply({})) as api:
        pass
    with pytest.raises(ConfigError, match=r"no OpenAI-compatible server.*refused"):
        model_of(api)


def test_a_key_is_asked_for() -> None:
    denied = FakeReply({"error": {"message": "who are you"}}, status=401)
    with fake_api(lambda path, body: denied) as api:
        with pytest.raises(ConfigError, match=r"who are you.*--api-key"):
            model_of(api)


def test_a_server_without_models_needs_a_name() -> None:
    with fake_api(lambda path, body: FakeReply({"data": []})) as api:
        with pytest.raises(ConfigError, match="--model"):
            model_of(api)
        assert model_of(api, model="mine").name == "mine"


def test_what_is_asked_and_what_is_understood() -> None:
    call = {"id": "x1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]}
    reply = {
        "choices": [{"message": message, "finish_reason": "tool_calls"}],
        "usage": {
            "completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 3}
        },
        "stats": {"rounds": 4},
    }  # fmt: skip
    with fake_api(lambda path, body: with_models(path, body, FakeReply(reply))) as api:
        subject = model_of(api)
        said = [{"role": "user", "content": "Go."}]
        answer = subject.ask(said, {"reasoning_effort": "low", "tools": []}, 77)
    assert answer == Answer(
        reasoning="hm",
        calls=(Call(name="f", arguments='{"a": 1}', call_id="x1"),),
        finish="tool_calls",
        completion_tokens=9,
        reasoning_tokens=3,
        rounds=4,
    )
    assert api.seen[-1][:2] == (
        "/v1/chat/completions",
        {
            "model": "first", "messages": said, "max_tokens": 77, "temperature": 0,
            "reasoning_effort": "low", "tools": [],
        },
    )  # fmt: skip


def test_a_plain_reply_of_another_server() -> None:
    with fake_api(lambda path, body: with_models(path, body, chat_reply("Rome"))) as api:
        answer = model_of(api).ask([{"role": "user", "content": "?"}], {}, 5)
    assert answer == Answer(content="Rome")


@pytest.mark.parametrize("reply", [FakeReply({"object": "error"}), FakeReply([]), not_there("x")])
def test_replies_that_are_none(reply: FakeReply) -> None:
    with fake_api(lambda path, body: with_models(path, body, reply)) as api:
        with pytest.raises(RequestError, match="/chat/completions"):
            model_of(api).ask([{"role": "user", "content": "?"}], {}, 5)


def test_tokens_are_counted_by_the_server() -> None:
    def answering(path: str, body: Any) -> FakeReply:
        if path == "/tokenize":
            return FakeReply({"count": len(body["prompt"].split()), "tokens": []})
        return with_models(path, body, not_there(path))

    with fake_api(answering) as api:
        subject = model_of(api)
        assert subject.count_tokens("one two three") == 3
        assert subject.notes == ()
    assert api.seen[-1][1] == {
        "model": "first", "prompt": "one two three", "add_special_tokens": False
    }  # fmt: skip


def test_where_nothing_counts_tokens_one_request_says_how_many_a_character_is() -> None:
    def answering(path: str, body: Any) -> FakeReply:
        if path == "/v1/chat/completions":
            assert body["max_tokens"] == 1
            assert len(body["messages"][0]["content"]) == PROBE_CHARS
            return chat_reply("A", prompt_tokens=1000)
        return with_models(path, body, not_there(path))

    with fake_api(answering) as api:
        subject = model_of(api)
        assert [subject.count_tokens("x" * n) for n in (400, 4, 401)] == [100, 1, 101]
        assert "estimated: 4.00 characters" in subject.notes[0]
    assert api.paths().count("/v1/chat/completions") == 1


def test_where_tokens_can_only_be_guessed_lengths_are_not_measured() -> None:
    def answering(path: str, body: Any) -> FakeReply:
        return with_models(
            path, body, chat_reply("A") if path.endswith("completions") else not_there(path)
        )

    with fake_api(answering) as api, pytest.raises(RequestError) as caught:
        model_of(api).count_tokens("abc")
    assert caught.value.code == NOT_MEASURABLE


@pytest.mark.parametrize("takes_none", [True, False])
def test_text_scores_are_those_of_the_prompt_alone(takes_none: bool) -> None:
    def answering(path: str, body: Any) -> FakeReply:
        if path != "/v1/completions":
            return with_models(path, body, not_there(path))
        if body["max_tokens"] == 0 and not takes_none:
            return FakeReply({"error": {"message": "max_tokens must be positive"}}, status=400)
        logprobs = {"token_logprobs": [None, -1.5, -0.25], "text_offset": [0, 2, 3]}
        if body["max_tokens"] == 1:
            logprobs = {"token_logprobs": [None, -1.5, -0.25, -9], "text_offset": [0, 2, 3, 5]}
        return FakeReply({"choices": [{"text": body["prompt"], "logprobs": logprobs}]})

    with fake_api(answering) as api:
        assert model_of(api).text_scores("abcde") == [-1.5, -0.25]


@pytest.mark.parametrize(
    "reply",
    [
        FakeReply({"choices": [{"text": "x", "logprobs": None}]}),
        FakeReply(
            {"choices": [{"logprobs": {"token_logprobs": [-1.0], "text_offset": [9]}}]}
        ),
        FakeReply({"error": {"message": "echo is not served"}}, status=400),
        not_there("/v1/completions"),
    ],
)  # fmt: skip
def test_where_texts_cannot_be_scored_it_says_why(reply: FakeReply) -> None:
    with fake_api(lambda path, body: with_models(path, body, reply)) as api:
        with pytest.raises(RequestError, match="echo and logprobs") as caught:
            model_of(api).text_scores("abcde")
    assert caught.value.code == NOT_MEASURABLE


CALLED = {"message": {"tool_calls": [{"id": "x"}]}}


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ({"choices": ["x"]}, "no choices"),
        ({"choices": {"0": {}}}, "no choices"),
        ({"choices": [{"message": []}]}, "message"),
        ({"choices": [CALLED]}, "tool_calls"),
        ({"choices": [{"message": {"tool_calls": {}}}]}, "tool_calls"),
        ({"choices": [{"message": {"content": 7}}]}, "content"),
        ({"choices": [{"finish_reason": 7}]}, "finish_reason"),
        ({"choices": [{}], "usage": []}, "usage"),
        ({"choices": [{}], "usage": {"completion_tokens": "9"}}, "completion_tokens"),
        ({"choices": [{}], "usage": {"completion_tokens_details": 1}}, "details"),
        ({"choices": [{}], "stats": {"rounds": "many"}}, "rounds"),
        ({"choices": [{}], "stats": {"rounds": -1}}, "rounds"),
    ],
)
def test_malformed_replies_are_errors_of_their_case(reply: Any, text: str) -> None:
    with fake_api(lambda path, body: with_models(path, body, FakeReply(reply))) as api:
        with pytest.raises(RequestError, match=text) as caught:
            model_of(api).ask([{"role": "user", "content": "?"}], {}, 5)
    assert caught.value.code != NOT_MEASURABLE


def test_parts_of_a_content_are_put_together() -> None:
    parts = [{"type": "text", "text": "Ro"}, {"type": "image"}, {"type": "text", "text": "me"}]
    reply = FakeReply({"choices": [{"message": {"content": parts}}]})
    with fake_api(lambda path, body: with_models(path, body, reply)) as api:
        assert model_of(api).ask([{"role": "user", "content": "?"}], {}, 5).content == "Rome"


@pytest.mark.parametrize("score", ["-1", True, [], 900.0, None])
def test_scores_that_are_no_log_probabilities(score: Any) -> None:
    logprobs = {"token_logprobs": [None, score], "text_offset": [0, 1]}
    reply = FakeReply({"choices": [{"logprobs": logprobs}]})
    with fake_api(lambda path, body: with_models(path, body, reply)) as api:
        with pytest.raises(RequestError):
            model_of(api).text_scores("abcde")


@pytest.mark.parametrize("count", [-5, 0, 10**9])
def test_a_count_of_tokens_that_cannot_be(count: int) -> None:
    reply = FakeReply({"count": count})
    with fake_api(lambda path, body: with_models(path, body, reply)) as api:
        with pytest.raises(RequestError, match="count of tokens right"):
            model_of(api).count_tokens("one two three")


@pytest.mark.parametrize("status", [500, 507])
def test_a_server_that_fails_once_can_still_score_texts(status: int) -> None:
    failed = FakeReply({"error": {"message": "oops"}}, status=status)
    with fake_api(lambda path, body: with_models(path, body, failed)) as api:
        with pytest.raises(RequestError, match="oops") as caught:
            model_of(api).text_scores("abcde")
    assert caught.value.code != NOT_MEASURABLE


def test_a_model_that_is_not_listed() -> None:
    with fake_api(lambda path, body: FakeReply(MODELS)) as api:
        with pytest.raises(ConfigError, match="--model is 'third'.*it lists first, second$"):
            model_of(api, model="third")


def test_a_server_that_takes_no_more_requests_is_told_as_such() -> None:
    limited = FakeReply({"error": {"message": "rate limit"}}, status=429)
    with fake_api(lambda path, body: limited) as api:
        with pytest.raises(CapacityError, match="429.*rate limit"):
            model_of(api)
