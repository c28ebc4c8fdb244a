"""`twinspark bench pair` as two processes: they meet, measure the same cells, and both end well."""

import json
from pathlib import Path

from tests.rank_process import RankProcess, free_address

CHILD = Path(__file__).with_name("bench_child.py")


def test_both_ranks_measure_and_end(tmp_path):
    address, out = free_address(), tmp_path / "pair.json"
    both = [RankProcess(CHILD, rank, address, out) for rank in range(2)]
    try:
        for rank in both:
            code, said = rank.end(240)
            assert code == 0, said
    finally:
        for rank in both:
            rank.close()
    found = json.loads(out.read_text())
    assert found["tp"] == 2 and found["nccl"] == "2.0.0" and found["device"] == "none"
    assert found["checks"] == [
        {"rows": 1, "ranks_agree": True, "equal_to_rehearsal": True, "finite": True}
    ]
    assert [cell["rows"] for cell in found["exchanges"]] == [1] * 3 + [6] * 3 + [24] * 3 + [
        4096
    ] * 3
    assert len(found["cells"]) == 4 and all(cell["alone_us"] > 0 for cell in found["cells"])
    notes = {name for note in found["notes"] for name in note}
    assert notes == {"one shot over peer memory", "stand-ins"}
    assert any("round: all layers" in line and "pair" in line for line in both[0].out)
    assert not both[1].out
