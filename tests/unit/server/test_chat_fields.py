import pytest

from twinspark.messages import (
    MAX_STOP_CHARACTERS,
    MAX_TOP_K,
    GenerateRequest,
    Sampling,
    pack_message,
)
from twinspark.server.chat_fields import (
    NEUTRAL_VALUES,
    TEXT_FIELDS,
    ChatFields,
    ignored_fields,
    parse_chat_fields,
)
from twinspark.server.errors import ApiError
from twinspark.server.request_fields import HARMLESS_FIELDS


def test_every_field_has_one_owner() -> None:
    owners = [set(NEUTRAL_VALUES), HARMLESS_FIELDS, TEXT_FIELDS, set(ChatFields.model_fields)]
    names = [name for owner in owners for name in owner]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", NEUTRAL_VALUES)
def test_unserved_fields_pass_only_when_neutral(name: str) -> None:
    for value in (None, *NEUTRAL_VALUES[name]):
        parse_chat_fields({name: value})
    with pytest.raises(ApiError, match=name) as caught:
        parse_chat_fields({name: "surprise"})
    assert (caught.value.status, caught.value.param) == (400, name)


def test_zero_is_not_false_and_one_is_not_true() -> None:
    for body in ({"n": True}, {"top_logprobs": False}, {"logprobs": 0}, {"echo": 0}):
        with pytest.raises(ApiError):
            parse_chat_fields(body)


def test_gaps_are_filled_from_the_defaults() -> None:
    defaults = Sampling(temperature=0.3, top_k=20, top_p=0.9, min_p=0.1)
    sampling = parse_chat_fields({}).sampling(defaults, 5)
    assert sampling == Sampling(temperature=0.3, top_k=20, top_p=0.9, min_p=0.1, max_tokens=5)
    fields = parse_chat_fields({"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0})
    sampling = fields.sampling(defaults, 5)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0, 0, 1, 0)


@pytest.mark.parametrize(("given", "seed"), [(-1, 2**64 - 1), (2**64 + 5, 5), ("7", 7), (7.0, 7)])
def test_seeds_wrap(given: object, seed: int) -> None:
    assert parse_chat_fields({"seed": given}).sampling(Sampling(), 1).seed == seed


def test_numeric_strings_keep_every_digit() -> None:
    assert parse_chat_fields({"seed": str(2**63 + 1)}).seed == 2**63 + 1
    for text in ("", "1.5.2", "0x10", "9" * 400 + ".5"):
        with pytest.raises(ApiError):
            parse_chat_fields({"seed": text})


def test_ignored_fields_are_found_at_every_level() -> None:
    body = {
        "colour": 1, "nothing": None, "user": "x", "tools": [], "temperature": 1,
        "messages": [{"role": "user", "content": "", "mood": 1}, {"mood": 2}, 5],
        "stream_options": {"include_usage": True, "more": 1},
        "chat_template_kwargs": {"thinking": True, "style": 1},
    }  # fmt: skip
    assert ignored_fields(body) == [
        "colour", "messages.mood", "stream_options.more", "chat_template_kwargs.style",
    ]  # fmt: skip


def test_long_stop_strings_are_refused_by_length_alone() -> None:
    longest = "x" * MAX_STOP_CHARACTERS
    assert parse_chat_fields({"stop": longest}).stop == (longest,)
    for stop in (longest + "x", ["a", "x" * 30_000_000]):
        with pytest.raises(ApiError, match=f"at most {MAX_STOP_CHARACTERS} characters") as caught:
            parse_chat_fields({"stop": stop})
        assert caught.value.param == "stop" and len(caught.value.message) < 200


@pytest.mark.parametrize("value", [2**31, 2**64, 2**70, 1e29, str(2**70)])
def test_huge_integers_reach_the_wire(value: object) -> None:
    fields = parse_chat_fields({"top_k": value, "seed": value, "max_tokens": value})
    sampling = fields.sampling(Sampling(), 5)
    assert sampling.top_k == MAX_TOP_K and fields.reply_limit.tokens == int(float(str(value)))
    pack_message(GenerateRequest(request_id="a", prompt_ids=(1,), sampling=sampling))


def test_stream_options_of_another_type() -> None:
    with pytest.raises(ApiError, match="^stream_options must be an object, got 'yes'$"):
        parse_chat_fields({"stream_options": "yes"})
    with pytest.raises(ApiError, match="^stream_options must be an object, got list$"):
        parse_chat_fields({"stream_options": []})


SERVED = {
    "presence_penalty": (0.5, "presence_penalty", 0.5),
    "frequency_penalty": ("-1.5", "frequency_penalty", -1.5),
    "repetition_penalty": (1.1, "repetition_penalty", 1.1),
    "logit_bias": ({"5": 1, "7": "-100"}, "logit_bias", ((5, 1.0), (7, -100.0))),
    "banned_token_ids": ([3, 4], "banned_ids", (3, 4)),
    "allowed_token_ids": ([3], "allowed_ids", (3,)),
    "min_tokens": ("4", "min_tokens", 4),
    "thinking_budget": (0, "thinking_budget", 0),
    "loop_guard": (True, "loop_guard", "gentle"),
}


@pytest.mark.parametrize("name", SERVED)
def test_fields_reach_the_engine(name: str) -> None:
    value, attribute, expected = SERVED[name]
    assert getattr(parse_chat_fields({name: value}).sampling(Sampling(), 9), attribute) == expected
    given = Sampling(min_tokens=3, loop_guard="gentle", presence_penalty=1.0)
    for body in ({}, {name: None}):
        assert parse_chat_fields(body).sampling(given, 9) == Sampling(
            min_tokens=3, loop_guard="gentle", presence_penalty=1.0, max_tokens=9
        )


@pytest.mark.parametrize(
    ("value", "word"), [("off", "off"), ("gentle", "gentle"), (False, "off"), (True, "gentle")]
)
def test_the_loop_guard_is_a_word_or_a_switch(value: object, word: str) -> None:
    given = Sampling(loop_guard="gentle")
    assert parse_chat_fields({"loop_guard": value}).sampling(given, 9).loop_guard == word


def test_log_probabilities() -> None:
    def asked(**body: object) -> int | None:
        return parse_chat_fields(body).sampling(Sampling(), 1).logprobs

    assert asked() is None and asked(logprobs=False, top_logprobs=0) is None
    assert asked(logprobs=True) == 0 and asked(logprobs=True, top_logprobs=20) == 20


def test_terms_of_service() -> None:
    plain = GenerateRequest(request_id="a", prompt_ids=(1,))
    assert parse_chat_fields({}).served(plain) == plain
    body = {
        "priority": "background", "deadline_ms": 500, "max_queue_ms": "60000", "cache_salt": "me",
        "approximations": ["expert_pruning", "expert_pruning"], "return_token_ids": True,
    }  # fmt: skip
    assert parse_chat_fields(body).served(plain) == GenerateRequest(
        request_id="a", prompt_ids=(1,), priority="background", deadline_ms=500,
        max_queue_ms=60000, cache_salt="me", approximations=("expert_pruning",),
        return_token_ids=True,
    )  # fmt: skip


BAD = [
    ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("frequency_penalty", True),
    ("repetition_penalty", 0), ("repetition_penalty", 11), ("logit_bias", [[5, 1]]),
    ("logit_bias", {"a": 1}), ("logit_bias", {"5": 101}), ("logit_bias", {"-1": 1}),
    ("logit_bias", {"5": None}), ("logit_bias", {"5": 1, "05": 2}), ("logit_bias", {"1.5": 1}),
    ("banned_token_ids", 5), ("banned_token_ids", ["5"]), ("banned_token_ids", [True]),
    ("banned_token_ids", [-1]), ("allowed_token_ids", []), ("allowed_token_ids", [2.0]),
    ("min_tokens", -1), ("min_tokens", 1.5), ("logprobs", 1), ("logprobs", "yes"),
    ("top_logprobs", 21), ("top_logprobs", -1), ("top_logprobs", 3), ("thinking_budget", -1),
    ("thinking_budget", False), ("loop_guard", "hard"), ("loop_guard", 1), ("priority", "high"),
    ("priority", 1), ("deadline_ms", 0), ("deadline_ms", 1.5), ("max_queue_ms", 0),
    ("max_queue_ms", True), ("cache_salt", 5), ("cache_salt", "x" * 257),
    ("approximations", "expert_pruning"), ("approximations", ["speed"]), ("approximations", [1]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda v: str(v)[:16])
def test_bad_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat_fields({name: value})
    assert (caught.value.status, caught.value.param) == (400, name)
    assert name in caught.value.message and len(caught.value.message) < 250


@pytest.mark.parametrize(
    "body",
    [{"logit_bias": {"99": 1, "100": 1}}, {"banned_token_ids": [100]},
     {"allowed_token_ids": [3, 2**40]}],
    ids=str,
)  # fmt: skip
def test_ids_outside_the_vocabulary(body: dict[str, object]) -> None:
    (name,) = body
    fields = parse_chat_fields(body)
    with pytest.raises(ApiError, match="expected 0 to 99") as caught:
        fields.check_ids(100)
    assert caught.value.param == name
    parse_chat_fields({"logit_bias": {"99": 1}, "banned_token_ids": [0]}).check_ids(100)


@pytest.mark.parametrize("name", ["min_tokens", "thinking_budget", "deadline_ms", "max_queue_ms"])
@pytest.mark.parametrize("value", [1e300, 2**64, "9" * 300])
def test_counts_beyond_the_wire_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat_fields({name: value})
    assert caught.value.status == 400 and caught.value.param == name
