"""Evaluations: generated tasks with known answers, asked of a pack or of any such server.

Read `case.py` first (what a task is), then one of `tasks/` (each makes cases from a seed and
judges answers), `models.py` (a pack in this process, or a server), `run.py` (asks and counts),
`report.py` and `plot.py`. Nothing here knows how a model is trained; the demo model's training
takes its examples from `tasks/`, from other seeds.
"""
