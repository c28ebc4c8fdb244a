"""The index search over pages: the reference on the CPU; on a GPU the same choices, bit for bit."""

from dataclasses import replace

import pytest
import torch
from tests.kernels.index_data import WIDTH, Search, random_search

from twinspark.errors import KernelUnsupported
from twinspark.kernels.cuda.compile import ARCHITECTURES, compile_cubin
from twinspark.kernels.index import KeyPages, Wanted
from twinspark.kernels.index.cuda import (
    CHOOSE_SOURCE,
    CHOOSE_THREADS,
    FEW_ROWS,
    FEW_SOURCE,
    MANY_POSITIONS,
    MANY_SOURCE,
    QUERIES_SOURCE,
    SCORES_SOURCE,
    SELECT_SHARED,
    SELECT_SOURCE,
    choose_positions,
    chooses_many,
    few_defines,
    few_parts,
    row_pitch,
    rows_at_once,
    scores_defines,
    scores_few,
    scores_shared,
    takes_all,
)
from twinspark.kernels.index.reference import run_scores
from twinspark.kernels.index_search import Search as Wholesale
from twinspark.kernels.index_search import search
from twinspark.kernels.index_select import index_scores
from twinspark.kernels.rope import rotate
from twinspark.kernels.rounding import qdq4x32

SHARED = {"sm_90a": 232448, "sm_121": 101376}  # bytes a block may have
NAMES = {
    "queries": b"index_queries",
    "scores": b"index_scores",
    "select": b"index_select",
    "few": b"index_scores_few",
    "choose": b"index_choose_32768",
    "many": b"index_choose_many",
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("heads", "packed"), [(32, True), (2, False)])
def test_kernels_compile(heads: int, packed: bool, arch: str) -> None:
    variants = [
        (QUERIES_SOURCE, {"HEADS": heads}),
        (SELECT_SOURCE, {"STAGED": int(SELECT_SHARED[1] <= SHARED[arch])}),
        (CHOOSE_SOURCE, {}),
        (MANY_SOURCE, {}),
        *((FEW_SOURCE, few_defines(heads, gathered=gathered)) for gathered in (False, True)),
        *(
            (SCORES_SOURCE, scores_defines(heads, packed=packed, gathered=gathered))
            for gathered in (False, True)
        ),
    ]
    for source, defines in variants:
        cubin = compile_cubin(source, arch=arch, defines=defines)
        assert NAMES[source.stem] in cubin


def test_blocks_fit_their_devices() -> None:
    for packed in (True, False):
        for gathered in (True, False):
            assert scores_shared(32, packed=packed, gathered=gathered) <= min(SHARED.values())
    assert SELECT_SHARED[1] <= SHARED["sm_90a"] and SELECT_SHARED[0] <= SHARED["sm_121"]


def test_scratch_is_bounded() -> None:
    whole = Wanted(k=512, max_entries=1 << 20, block_size=8, top_blocks=2048)
    assert row_pitch(whole) == 1 << 20
    rows = rows_at_once(whole, 1 << 20)
    assert rows >= 8 and rows * 4 * (1 << 20) * (1 + 1 / 64 + 1 / 8) <= whole.scratch_bytes
    assert rows_at_once(replace(whole, scratch_bytes=1), 1 << 20) == 1
    few = replace(whole, top_blocks=0, candidates_TB=torch.zeros(3, 2048, dtype=torch.int32))
    assert row_pitch(few) == 2048 * 8 and row_pitch(replace(few, max_entries=70)) == 128


def test_nothing_is_scored_where_rows_take_all() -> None:
    assert takes_all(Wanted(k=512, max_entries=512))
    assert not takes_all(Wanted(k=512, max_entries=513))
    # blocks that are all chosen anyway need no scores either
    assert takes_all(Wanted(k=512, max_entries=512, block_size=8, top_blocks=64))
    assert not takes_all(Wanted(k=512, max_entries=512, block_size=8, top_blocks=63))


def test_few_positions_are_chosen_in_registers() -> None:
    wanted = Wanted(k=512, max_entries=3000)
    assert choose_positions(wanted, row_pitch(wanted)) == 4096
    most = replace(wanted, max_entries=32768)
    assert choose_positions(most, row_pitch(most)) == 32768
    assert choose_positions(wanted, 32768 + 64) is None
    assert choose_positions(replace(wanted, max_entries=512), 512) is None  # all are taken
    assert choose_positions(replace(wanted, block_size=8, top_blocks=300), 3008) is None
    assert all(threads >= wanted.k for threads in CHOOSE_THREADS.values())


def test_many_positions_are_chosen_by_tiles() -> None:
    wanted = Wanted(k=512, max_entries=32768 + 1)
    pitch = row_pitch(wanted)  # whole fours of tiles, which that kernel reads
    assert pitch == 33024 and choose_positions(wanted, pitch) is None and chooses_many(pitch)
    assert not chooses_many(5056) and not chooses_many(MANY_POSITIONS + 256)


def test_few_rows_make_their_queries_with_their_scores() -> None:
    keys = random_search(rows=1, entries=64).keys
    wanted = Wanted(k=512, max_entries=3000)
    assert scores_few(FEW_ROWS, keys, wanted) and not scores_few(FEW_ROWS + 1, keys, wanted)
    assert not scores_few(1, replace(keys, page_rows=96), wanted)
    assert not scores_few(1, replace(keys, page_rows=16), wanted)
    assert not scores_few(1, replace(keys, packed=False), wanted)
    assert few_parts(1, 8192, 132) == 32  # 256 keys a block
    assert few_parts(24, 16384, 132) == 11 and few_parts(500, 64, 132) == 1


class _Slot:
    """A slot's keys, as `kernels/index_search.py` wants them."""

    def __init__(self, data: Search, slot: int) -> None:
        self.data, self.slot = data, slot

    def read_range(self, first: int, count: int) -> torch.Tensor:
        return self.read(torch.arange(first, first + count))

    def read(self, entries_L: torch.Tensor) -> torch.Tensor:
        rows = self.data.keys.page_rows
        pages = self.data.table[self.slot].long()[entries_L // rows]
        return self.data.keys.read(pages, entries_L % rows)

    def own_units(self, unit: int, length: int) -> None:
        return None

    def is_own(self, entries_L: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(entries_L, dtype=torch.bool)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("ties", [True, False])
def test_reference_chooses_what_the_search_of_a_slot_does(packed: bool, ties: bool) -> None:
    # two heads: there the order of sums is the same
    data = random_search(rows=14, entries=900, heads=2, slots=3, page_rows=8, ties=ties)
    if not packed:
        data = random_search(
            rows=14, entries=900, heads=2, slots=3, page_rows=8, ties=ties, packed=False
        )
    wanted = Wanted(k=32, max_entries=900, block_size=4, top_blocks=60)
    found = data.select(wanted, "reference")
    scale = 128**-0.5 * 32**-0.5
    q = qdq4x32(rotate(data.q, data.cos, data.sin))
    w = (data.w.float() * scale).bfloat16()
    for slot in range(3):
        rows = data.slots == slot
        length = int(data.visible[rows].max())
        whole = Wholesale(k=32, length=length, block_size=4, top_blocks=60, scratch_bytes=1 << 20)
        expected = search(q[rows], w[rows], data.visible[rows].long(), _Slot(data, slot), whole)
        assert torch.equal(found.entries_TK[rows].long(), expected.entries_TK)
        assert found.blocks_TB is not None and expected.blocks_TB is not None
        assert torch.equal(found.blocks_TB[rows].long(), expected.blocks_TB)
        bound = replace(whole, top_blocks=0, candidates_TB=expected.blocks_TB)
        inside = search(q[rows], w[rows], data.visible[rows].long(), _Slot(data, slot), bound)
        again = data.rows(rows).select(
            Wanted(
                k=32, max_entries=900, block_size=4, candidates_TB=found.blocks_TB[rows].clone()
            ),
            "reference",
        )
        assert torch.equal(again.entries_TK.long(), inside.entries_TK)
    places = data.table[data.slots.long()[:, None], found.entries_TK.long().clamp(min=0) // 8] * 8
    places = places + found.entries_TK % 8
    assert torch.equal(found.physical_TK, places.masked_fill(found.entries_TK < 0, -1))


def test_order_of_heads() -> None:
    data = random_search(rows=3, entries=40, heads=6)
    keys = data.keys.read(torch.zeros(40, dtype=torch.long), torch.arange(40))
    q = qdq4x32(data.q)
    runs = [index_scores(q[:, i : i + 2], data.w[:, i : i + 2], keys) for i in (0, 2, 4)]
    assert torch.equal(run_scores(q, data.w, keys), (runs[0] + runs[1]) + runs[2])
    plain = index_scores(q, data.w, keys)
    assert torch.allclose(run_scores(q, data.w, keys), plain, rtol=1e-5, atol=1e-3)
    assert torch.equal(run_scores(q[:, :2], data.w[:, :2], keys), runs[0])


def test_missing_pages_are_not_chosen() -> None:
    data = random_search(rows=2, entries=64, heads=2, page_rows=8)
    data.table[0, 3] = -1
    found = data.select(Wanted(k=64, max_entries=64))
    entries = found.entries_TK[0]
    assert not ((entries >= 24) & (entries < 32)).any() and int((entries >= 0).sum()) == 56


def test_refusals() -> None:
    data = random_search(rows=2, entries=64, heads=2, page_rows=8)
    wanted = Wanted(k=8, max_entries=64)
    with pytest.raises(KernelUnsupported, match="needs a CUDA device"):
        data.select(wanted, "cuda")
    for change, text in (
        ({"k": 513}, "up to 512 entries"),
        ({"block_size": 16}, "1, 2, 4 or 8 entries"),
        ({"max_entries": 1 << 22}, "up to 2097152 entries"),
    ):
        with pytest.raises(KernelUnsupported, match=text):
            data.select(replace(wanted, **change), "cuda")
    with pytest.raises(ValueError, match="visible must be int32"):
        replace(data, visible=data.visible.long()).select(wanted)
    with pytest.raises(ValueError, match=r"w must be \(2, 2\)"):
        replace(data, w=data.w[:1]).select(wanted)
    with pytest.raises(ValueError, match="candidates must be int32"):
        data.select(replace(wanted, candidates_TB=torch.zeros(2, 4)))
    narrow = KeyPages(data.keys.data, 8, WIDTH // 2, packed=False)
    with pytest.raises(ValueError, match="queries have 128 values a head, keys 64"):
        replace(data, keys=narrow).select(wanted)


# ---- on a GPU

CASES = {
    # rows, entries, heads, slots, page rows, k, block size, top blocks
    "tiny": (13, 100, 2, 3, 8, 8, 4, 4),
    "demo": (24, 1000, 2, 4, 256, 128, 4, 64),
    "fewer, larger blocks": (24, 1000, 2, 4, 256, 64, 8, 16),
    "full": (6, 5000, 32, 1, 128, 512, 8, 300),
    "tiles first, slots": (24, 40000, 32, 4, 128, 512, 8, 2048),
    "pages of any size": (9, 3000, 2, 1, 100, 64, 2, 100),
}


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("kind", ["random", "ties", "spread"])
def test_cuda_chooses_what_the_reference_does(case: str, kind: str, packed: bool) -> None:
    rows, entries, heads, slots, page_rows, k, size, blocks = CASES[case]
    if (entries > 10000 and kind != "random") or (heads == 32 and not packed):
        pytest.skip("too slow for what it would add")
    data = random_search(
        rows=rows, entries=entries, heads=heads, slots=slots, page_rows=page_rows, packed=packed,
        ties=kind == "ties", spread=6 if kind == "spread" else 0,
    )  # fmt: skip
    wanted = Wanted(k=k, max_entries=entries, block_size=size, top_blocks=blocks)
    expected, found = data.select(wanted, "reference"), data.at("cuda").select(wanted, "cuda")
    assert torch.equal(found.entries_TK.cpu(), expected.entries_TK)
    assert torch.equal(found.physical_TK.cpu(), expected.physical_TK)
    assert expected.blocks_TB is not None and found.blocks_TB is not None
    assert torch.equal(found.blocks_TB.cpu(), expected.blocks_TB)
    inside = Wanted(k=k, max_entries=entries, block_size=size, candidates_TB=expected.blocks_TB)
    expected = data.select(inside, "reference")
    on_gpu = replace(inside, candidates_TB=found.blocks_TB)
    found = data.at("cuda").select(on_gpu, "cuda")
    assert torch.equal(found.entries_TK.cpu(), expected.entries_TK)
    assert torch.equal(found.physical_TK.cpu(), expected.physical_TK)


@pytest.mark.gpu
@pytest.mark.parametrize("entries", [700, 2048, 3900, 8000, 16384, 30000])
@pytest.mark.parametrize("kind", ["random", "ties", "spread"])
def test_few_positions_of_few_rows(entries: int, kind: str) -> None:
    rows = 12 if entries < 5000 else 3
    data = random_search(
        rows=rows, entries=entries, slots=3, ties=kind == "ties",
        spread=6 if kind == "spread" else 0, seed=entries,
    )  # fmt: skip
    data.table[0, 3] = -1
    if rows > 3:
        data.slots[5] = -1
    for k in (512, 100):
        wanted = Wanted(k=k, max_entries=entries)
        expected, found = data.select(wanted, "reference"), data.at("cuda").select(wanted, "cuda")
        assert torch.equal(found.entries_TK.cpu(), expected.entries_TK)
        assert torch.equal(found.physical_TK.cpu(), expected.physical_TK)


@pytest.mark.gpu
@pytest.mark.parametrize("visible", [40000, 33000, 20000, 300, 0])
@pytest.mark.parametrize("kind", ["random", "ties", "spread", "some spread"])
def test_many_positions(visible: int, kind: str) -> None:
    # pages of 100 rows are read key by key
    data = random_search(
        rows=3, entries=40000, ties=kind == "ties", spread=6 if kind == "spread" else 0,
        page_rows=128 if visible > 33000 else 100, seed=visible,
    )  # fmt: skip
    if kind == "some spread":  # of a row all heads do, of another one none
        data.q[1] *= torch.tensor([1.0, 64, 1, 1 / 64]).repeat_interleave(32).bfloat16()
        data.q[2, :5] *= torch.tensor([1.0, 64, 1, 1 / 64]).repeat_interleave(32).bfloat16()
    data.table[0, 3] = -1
    data.visible[1] = visible
    for k, blocks in ((512, 0), (100, 0), (512, 2048)):
        wanted = Wanted(k=k, max_entries=40000, block_size=8, top_blocks=blocks)
        expected, found = data.select(wanted, "reference"), data.at("cuda").select(wanted, "cuda")
        assert torch.equal(found.entries_TK.cpu(), expected.entries_TK)
        assert torch.equal(found.physical_TK.cpu(), expected.physical_TK)
        if expected.blocks_TB is not None and found.blocks_TB is not None:
            assert torch.equal(found.blocks_TB.cpu(), expected.blocks_TB)


@pytest.mark.gpu
@pytest.mark.parametrize("most", [32768, 40000])
def test_more_reach_the_bound_than_a_list_holds(most: int) -> None:
    data = random_search(rows=2, entries=most, seed=most)
    data.visible.fill_(most)
    data.table[0, : 6000 // 128] = data.table[0, 0]  # 6,000 keys are 128, over and over
    data.table[0, -9000 // 128 :] = data.table[0, 1]
    wanted = Wanted(k=512, max_entries=most)
    expected, found = data.select(wanted, "reference"), data.at("cuda").select(wanted, "cuda")
    assert torch.equal(found.entries_TK.cpu(), expected.entries_TK)


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0, 6])
def test_few_rows_choose_what_many_do(spread: int) -> None:
    data = random_search(rows=3 * FEW_ROWS, entries=3000, slots=3, seed=7, spread=spread)
    data = data.at("cuda")
    blocks = data.select(Wanted(k=64, max_entries=3000, block_size=8, top_blocks=200), "cuda")
    assert blocks.blocks_TB is not None
    everything = Wanted(k=512, max_entries=3000, block_size=8)
    for wanted in (everything, replace(everything, candidates_TB=blocks.blocks_TB)):
        together = data.select(wanted, "cuda")
        for first in range(0, 3 * FEW_ROWS, 16):
            part, few = slice(first, first + 16), wanted
            if wanted.candidates_TB is not None:
                few = replace(wanted, candidates_TB=wanted.candidates_TB[part].contiguous())
            found = data.rows(part).select(few, "cuda")
            assert torch.equal(found.entries_TK, together.entries_TK[part])
            assert torch.equal(found.physical_TK, together.physical_TK[part])


@pytest.mark.gpu
def test_many_rows_are_what_they_are_alone() -> None:
    data = random_search(rows=300, entries=3000, slots=3, seed=6, spread=6).at("cuda")
    wanted = Wanted(k=512, max_entries=3000, block_size=8, top_blocks=300)
    together = data.select(wanted, "cuda")
    assert together.blocks_TB is not None
    for first in range(0, 300, 60):
        part = slice(first, first + 60)
        few = data.rows(part).select(wanted, "cuda")
        assert few.blocks_TB is not None
        assert torch.equal(few.entries_TK, together.entries_TK[part])
        assert torch.equal(few.blocks_TB, together.blocks_TB[part])


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False])
def test_rows_that_take_all_skip_missing_pages(packed: bool) -> None:
    data = random_search(rows=5, entries=200, heads=2, page_rows=8, packed=packed)
    data.table[0, 3] = -1
    data.visible[1] = 29
    for k in (200, 150):  # without scores, and with them
        wanted = Wanted(k=k, max_entries=200)
        expected, found = data.select(wanted, "reference"), data.at("cuda").select(wanted, "cuda")
        assert torch.equal(found.entries_TK.cpu(), expected.entries_TK)
        assert torch.equal(found.physical_TK.cpu(), expected.physical_TK)


@pytest.mark.gpu
def test_equal_scores_go_to_the_lowest_entries() -> None:
    for length in (500, 3000, 40000, 300000):
        data = random_search(rows=3, entries=min(length, 40000), seed=4)
        data.w.zero_()
        data = data.at("cuda")
        data.table = data.table.repeat(1, -(-length // 40000)).contiguous()
        data.visible.fill_(length)
        found = data.select(Wanted(k=512, max_entries=length, block_size=8, top_blocks=32), "cuda")
        expected = torch.arange(512, device="cuda").masked_fill_(
            torch.arange(512, device="cuda") >= length, -1
        )
        assert (found.entries_TK == expected).all()
        alone = data.select(Wanted(k=512, max_entries=length), "cuda")
        assert (alone.entries_TK == expected).all()
        assert found.blocks_TB is not None
        blocks = torch.arange(32, device="cuda")
        blocks[-1] = (length - 1) // 8  # the newest is pinned
        assert (found.blocks_TB == blocks).all()


@pytest.mark.gpu
def test_rows_do_not_depend_on_the_call() -> None:
    data = random_search(rows=30, entries=20000, slots=4, seed=5).at("cuda")
    wanted = Wanted(k=512, max_entries=20000, block_size=8, top_blocks=500)
    together = data.select(wanted, "cuda")
    assert together.blocks_TB is not None
    for row in range(30):
        alone = data.rows(slice(row, row + 1)).select(wanted, "cuda")
        assert alone.blocks_TB is not None
        assert torch.equal(alone.entries_TK[0], together.entries_TK[row])
        assert torch.equal(alone.blocks_TB[0], together.blocks_TB[row])
    order = torch.randperm(30, device="cuda")  # slots in any order
    assert torch.equal(
        data.rows(order).select(wanted, "cuda").entries_TK, together.entries_TK[order]
    )
    larger = replace(wanted, max_entries=200000, scratch_bytes=1 << 22)
    assert torch.equal(data.select(larger, "cuda").entries_TK, together.entries_TK)
    padded = replace(data, slots=torch.where(data.slots == 1, -1, data.slots))
    entries = padded.select(wanted, "cuda").entries_TK
    gone = data.slots == 1
    assert (entries[gone] == -1).all()
    assert torch.equal(entries[~gone], together.entries_TK[~gone])


@pytest.mark.gpu
def test_captured_search_follows_lengths_and_slots() -> None:
    data = random_search(rows=30, entries=20000, slots=4, seed=5).at("cuda")
    wanted = Wanted(k=512, max_entries=20000, block_size=8, top_blocks=500)
    data.select(wanted, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = data.select(wanted, "cuda")
    for seed in range(4):
        g = torch.Generator("cuda").manual_seed(seed)
        data.visible.copy_(torch.randint(0, 20001, (30,), device="cuda", generator=g))
        data.slots.copy_(torch.randint(0, 4, (30,), device="cuda", generator=g))
        captured.entries_TK.fill_(-7)
        graph.replay()
        eager = data.select(wanted, "cuda")
        assert captured.blocks_TB is not None and eager.blocks_TB is not None
        assert torch.equal(captured.entries_TK, eager.entries_TK)
        assert torch.equal(captured.blocks_TB, eager.blocks_TB)
