"""Objectives that fall apart into independent ones, one for each output position."""

from convexformer.solvers.by_position.by_position import ByPosition, ByPositionOptions, parts_of

__all__ = ["ByPosition", "ByPositionOptions", "parts_of"]
