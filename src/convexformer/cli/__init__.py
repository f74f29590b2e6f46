"""The command line: ``convexformer ...``, also ``python -m convexformer ...``."""

from convexformer.cli.commands import app, main
from convexformer.cli.report import report

app.command()(report)

__all__ = ["app", "main"]
