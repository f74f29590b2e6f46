"""The report of a fitted model: one self-contained HTML page; ``report`` writes it."""

from convexformer.report.writing import report

__all__ = ["report"]
