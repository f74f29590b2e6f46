"""Maps of tokens that keep the problem convex: a head on mapped tokens is the same program with the same certificate."""

from convexformer.features.fastfood import KERNELS, KINDS, Fastfood, fwht, hadamard, padded

__all__ = ["KERNELS", "KINDS", "Fastfood", "fwht", "hadamard", "padded"]
