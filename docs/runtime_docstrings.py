"""Griffe extension: docstrings as the site shows them.

The estimators gather their Parameters section from their base classes when they are made, which the source alone does not
show (``convexformer.estimators.docstrings``): their docstrings are taken from the imported classes. References in the style
of Sphinx become plain code.
"""

import inspect
import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr):`~?(?:[\w.]+\.)?(\w+)`")


class RuntimeDocstrings(griffe.Extension):
    """Completes the docstrings of the estimators, and rewrites references."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is None:
            return
        if obj.is_class and obj.path.startswith("convexformer.estimators."):
            runtime = griffe.dynamic_import(obj.path)
            obj.docstring.value = inspect.getdoc(runtime) or obj.docstring.value
        obj.docstring.value = ROLE.sub(r"``\1``", obj.docstring.value)
