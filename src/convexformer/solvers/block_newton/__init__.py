"""Newton's method in output space for Hilbert norms and ridges of blocks."""

from convexformer.solvers.block_newton.block_newton import BlockNewton, BlockNewtonOptions

__all__ = ["BlockNewton", "BlockNewtonOptions"]
