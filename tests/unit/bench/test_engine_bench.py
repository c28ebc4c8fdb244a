"""The engine bench counts what happened, on the demo pack at a small size."""

import orjson

from twinspark.bench import engine as bench
from twinspark.llm import LLM


def test_cells_add_up_and_the_report_is_json():
    seen = []
    with LLM.demo(slots=2, max_context_tokens=256) as llm:
        cells = bench.measure(
            llm,
            texts=("chat", "code"),
            streams=(1, 2),
            max_tokens=12,
            repeats=1,
            on_cell=seen.append,
        )
    assert seen == cells and len(cells) == 8
    for cell in cells:
        assert 0 < cell.tokens <= 12 * cell.streams and len(cell.token_sha) == cell.streams
        assert cell.drafts or (cell.tokens_per_round == 1 and cell.accepted_per_round == 0)
    assert cells[0].token_sha == cells[1].token_sha != cells[4].token_sha
    document = bench.report(cells, pack="demo", load_seconds=1.0, date="2026-01-01")
    assert orjson.loads(orjson.dumps(document))["cells"][0]["text"] == "chat"
