"""Ranks: collectives in rank order and, later, launch and the plan link."""
