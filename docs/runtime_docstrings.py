"""Griffe extension: docstrings as Python sees them, for classes whose docstring is completed when they are made.

The estimators gather their Parameters section from their base classes (``convexformer.estimators.docstrings``), which the
source alone does not show.
"""

import inspect
from typing import Any

import griffe


class RuntimeDocstrings(griffe.Extension):
    """Replaces the docstrings of the estimators by those of the imported classes."""

    def on_class_instance(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if not cls.path.startswith("convexformer.estimators.") or cls.docstring is None:
            return
        runtime = griffe.dynamic_import(cls.path)
        cls.docstring.value = inspect.getdoc(runtime) or cls.docstring.value
