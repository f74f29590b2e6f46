"""Experiments, one per file: each takes settings and writes numbers and figures."""
