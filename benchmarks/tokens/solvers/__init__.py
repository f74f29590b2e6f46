"""The tools by name; a module is imported only in the process that runs it, since its package may be missing elsewhere."""

import importlib

SOLVERS = {
    "convexformer": "convexformer:Auto",
    "convexformer, fista": "convexformer:Fista",
    "convexformer, working_set": "convexformer:WorkingSet",
    "adelie": "adelie:Adelie",
    "adelie, path": "adelie:AdeliePath",
    "celer": "celer:Celer",
    "skglm": "skglm:Skglm",
    "copt": "copt:Copt",
    "CVXPY, SCS": "cvxpy:SCS",
    "CVXPY, CLARABEL": "cvxpy:Clarabel",
    "Adam": "adam:Adam",
}


def solver_class(name):
    """Return the class of that name."""
    module, _, attribute = SOLVERS[name].partition(":")
    return getattr(importlib.import_module(f"solvers.{module}"), attribute)
