"""Model folders, safetensors and JSON, never pickle; and files for other runtimes."""

from convexformer.io.export import Export, export
from convexformer.io.folder import ModelFileError
from convexformer.io.models import load, save

__all__ = ["Export", "ModelFileError", "export", "load", "save"]
