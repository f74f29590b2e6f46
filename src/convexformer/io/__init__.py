"""Model folders, safetensors and JSON, never pickle; and files for other runtimes."""

from convexformer.io.folder import ModelFileError
from convexformer.io.models import load, save
from convexformer.io.shipping import Export, export

__all__ = ["Export", "ModelFileError", "export", "load", "save"]
