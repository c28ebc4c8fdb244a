"""The wire between server and engine: every message survives any cutting of the byte stream."""

import dataclasses
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinspark import messages as m
from twinspark.errors import FormatError

STATS = m.ReplyStats(prompt_tokens=3, completion_tokens=2, seed=2**64 - 1, token_ids=(5, 1))
ALL = [
    m.GenerateRequest(request_id="a", prompt_ids=(0, 7), sampling=m.Sampling(stop=("x", "\n\n"))),
    m.GenerateRequest(
        request_id="b", prompt_ids=(1,), sampling=m.Sampling(logit_bias=((3, -1.5), (4, 2.0)))
    ),
    m.GenerateRequest(
        request_id="c",
        prompt_ids=(1,),
        calls=m.CallSettings(parallel=False, opened=True, called="f"),
        forced_ids=(5, 6),
        form=m.Form(grammar='start: "\u00e9\\n"', starts="calls"),
    ),
    m.Cancel(request_id="a"),
    m.Shutdown(),
    m.Loading(phase="weights", fraction=0.5),
    m.Ready(model_name="d", vocab_size=9, max_context_tokens=8, num_slots=4, load_seconds=0.1),
    m.Beat(),
    m.Waiting(request_id="a", position=2, cause="pool", predicted_ms=12.5),
    m.Admitted(request_id="a", cached_tokens=256),
    m.PromptScores(
        request_id="a", first=1, scores=(m.TokenScore(token_id=4, logprob=-0.5, top=((7, -0.1),)),)
    ),
    m.TokenDelta(request_id="a", token_ids=(5, 1)),
    m.TokenDelta(request_id="a", token_ids=(5,), scores=(m.TokenScore(token_id=5, logprob=-1.0),)),
    m.Finished(request_id="a", reason="stop", stats=STATS, stop_string="x"),
    m.Failed(request_id="a", kind="capacity", message="no room", code="capacity"),
    m.EngineStatus(running=1, waiting=0, rounds=3, slots_free=3),
]


def test_every_message_type_is_covered():
    assert {type(x).__name__ for x in ALL} == set(m._TYPES)


@pytest.mark.parametrize("message", ALL, ids=lambda x: type(x).__name__)
def test_round_trip(message):
    frame = m.pack_message(message)
    assert m.parse_message(frame[4:]) == message
    assert struct.unpack("<I", frame[:4])[0] == len(frame) - 4


@given(st.lists(st.integers(1, 40), min_size=1))
def test_any_cut_of_the_stream_gives_the_same_messages(cuts):
    stream = b"".join(m.pack_message(x) for x in ALL)
    reader, out, at = m.FrameReader(), [], 0
    while at < len(stream):
        size = cuts[at % len(cuts)]
        out += reader.feed(stream[at : at + size])
        at += size
    assert out == ALL


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"type":"Nope"}', b'{"type":"Cancel"}'])
def test_foreign_bodies_are_refused(body):
    with pytest.raises(FormatError):
        m.parse_message(body)


def test_a_huge_length_is_refused_before_its_bytes_arrive():
    with pytest.raises(FormatError, match="at most"):
        m.FrameReader().feed(struct.pack("<I", m.MAX_MESSAGE_BYTES + 1))


def test_messages_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ALL[0].request_id = "b"
