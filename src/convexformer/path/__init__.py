"""Regularisation paths: certified solutions from ``beta_max`` down, each started from the one before."""

from convexformer.path.walk import Path, beta_ratios, follow, path, total_clock, walk

__all__ = ["Path", "beta_ratios", "follow", "path", "total_clock", "walk"]
