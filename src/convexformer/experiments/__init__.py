"""Experiments: one a file; config in, numbers and figures out."""
