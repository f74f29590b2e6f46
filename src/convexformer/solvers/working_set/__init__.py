"""Working sets: solve on the few token slices that matter, then let the full gradient say which others do."""

from convexformer.solvers.working_set.working_set import WorkingSet, WorkingSetOptions

__all__ = ["WorkingSet", "WorkingSetOptions"]
