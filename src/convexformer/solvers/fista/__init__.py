"""FISTA: accelerated proximal gradient, with Newton steps at its gap checks."""

from convexformer.solvers.fista.fista import Fista, FistaOptions, fista

__all__ = ["Fista", "FistaOptions", "fista"]
