"""How prompts agree: digests that say nothing by themselves, and common lengths."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from twinspark.server.prefixes import MAX_HELD_TOKENS, MAX_TOKENS, PrefixBook, common

TURN = 7


def book(**options) -> PrefixBook:
    return PrefixBook(**{"assistant_id": TURN, "salt": b"s"} | options)


def test_a_growing_chat_agrees_with_itself_and_others_by_its_head() -> None:
    notes = book()
    head = [1, 2, 3, 4]
    first = notes.note([*head, 10, TURN], head_tokens=4)
    assert (first["lcp"], first["lcp_same"], first["lcp_other"]) == (0, 0, 0)
    second = notes.note([*head, 10, TURN, 20, 21, TURN], head_tokens=4)
    assert (second["lcp"], second["lcp_same"], second["lcp_other"]) == (6, 6, 0)
    other = notes.note([*head, 11, TURN], head_tokens=4)
    assert (other["lcp"], other["lcp_same"], other["lcp_other"]) == (4, 0, 4)
    assert first["conv"] == second["conv"] != other["conv"]
    assert first["sys_hash"] == other["sys_hash"] and first["sys_len"] == 4
    assert notes.note([9], head_tokens=None)["sys_hash"] is None


def test_digests_depend_on_the_salt() -> None:
    hashes = {book(salt=s).note([1, 2], head_tokens=None)["head_hash"] for s in (b"a", b"b", None)}
    assert len(hashes) == 3 and all(len(h) == 16 for h in hashes)


def test_what_is_held_is_bounded() -> None:
    notes = book()
    for n in range(40):
        notes.note([n] * MAX_TOKENS, head_tokens=None)
    assert notes._held_bytes <= 4 * MAX_HELD_TOKENS
    for n in range(100):
        notes.note([n], head_tokens=None)
    assert len(notes._by_age) == len(notes._ordered) == 64
    long = notes.note([5] * (MAX_TOKENS + 9), head_tokens=None)
    assert notes.note([5] * (MAX_TOKENS + 9), head_tokens=None)["lcp"] == MAX_TOKENS > long["lcp"]


def agree(a: list[int], b: list[int]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


LISTS = st.lists(st.integers(0, 3) | st.just(TURN) | st.integers(0, 2**31 - 1), max_size=9)


@given(LISTS, LISTS)
def test_common(a: list[int], b: list[int]) -> None:
    assert common(*(array("i", ids).tobytes() for ids in (a, b))) == agree(a, b)


@given(st.lists(st.lists(st.integers(0, 2) | st.just(TURN), max_size=9), max_size=80))
def test_agreement_is_what_looking_at_all_of_them_gives(prompts: list[list[int]]) -> None:
    notes = book()
    seen: list[tuple[list[int], str]] = []
    for prompt in prompts:
        said = notes.note(prompt, head_tokens=None)
        newest = seen[-64:]
        same = [agree(prompt, old) for old, conv in newest if conv == said["conv"]]
        other = [agree(prompt, old) for old, conv in newest if conv != said["conv"]]
        assert said["lcp_same"] == max(same, default=0)
        assert said["lcp_other"] == max(other, default=0)
        seen.append((prompt, said["conv"]))
