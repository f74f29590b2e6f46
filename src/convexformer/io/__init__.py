"""Model folders: ``config.json`` beside one safetensors file. Plain numbers and text; loading never executes code."""

from convexformer.io.folder import ModelFileError
from convexformer.io.models import load, save, saved_with
from convexformer.io.versions import environment

__all__ = ["ModelFileError", "environment", "load", "save", "saved_with"]
