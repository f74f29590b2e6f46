"""Model folders, safetensors and JSON, never pickle; and files for other runtimes."""

from convexformer.io.folder import ModelFileError
from convexformer.io.models import load, save, saved_with
from convexformer.io.shipping import Export, export
from convexformer.io.versions import environment

__all__ = ["Export", "ModelFileError", "environment", "export", "load", "save", "saved_with"]
