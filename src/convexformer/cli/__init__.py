"""The command line: ``convexformer ...``, also ``python -m convexformer ...``."""

from convexformer.cli.commands import app, main

__all__ = ["app", "main"]
