"""Measurements: cells, gates, evaluations and receipts."""
