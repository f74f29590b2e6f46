"""Column generation over ReLU neurons."""

from convexformer.solvers.column_generation.column_generation import ColumnGeneration
from convexformer.solvers.column_generation.descent import descend

__all__ = ["ColumnGeneration", "descend"]
