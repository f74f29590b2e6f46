"""Nuclear norms of matrices too large to form, on small subspaces of their columns."""

from convexformer.solvers.row_space.row_space import RowSpace

__all__ = ["RowSpace"]
