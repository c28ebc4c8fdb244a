"""Ranks: collectives in rank order, the join, the plan link, and failing together.

Knows nothing of the model, of requests or of what a plan means. Read next: `team.py`.
"""
