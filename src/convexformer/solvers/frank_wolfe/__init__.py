"""Frank-Wolfe on combinations of atoms."""

from convexformer.solvers.frank_wolfe.frank_wolfe import FrankWolfe, FrankWolfeOptions

__all__ = ["FrankWolfe", "FrankWolfeOptions"]
