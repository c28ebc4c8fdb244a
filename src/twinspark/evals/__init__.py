"""Evaluations: generated tasks with known answers, asked of a pack or of any such server.

One request from the command line to a score: `catalog.py` makes the evaluation; `run.py` takes its
items (`evaluation.py`; cases with steps through `judged.py`, measurements in `tasks/text.py` and
`tasks/drafts.py`) and asks a subject, `models.py` or `servers.py` over `http_client.py`;
`report.py` adds up, `plot.py` draws. Read `case.py` first, then one of `tasks/`, which make cases
from a seed and judge answers. Nothing here knows how a model is trained; the demo model's training
takes its examples from `tasks/`, from other seeds.
"""
