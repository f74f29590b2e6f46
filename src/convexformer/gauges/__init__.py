"""Gauges: value, prox, polar (value and kind) and atom of each."""

from convexformer.gauges.base import Gauge, Penalty, Polar, PolarKind
from convexformer.gauges.group import GroupNorm
from convexformer.gauges.nuclear import NuclearNorm
from convexformer.gauges.ridge import Ridge

__all__ = ["Gauge", "GroupNorm", "NuclearNorm", "Penalty", "Polar", "PolarKind", "Ridge"]
