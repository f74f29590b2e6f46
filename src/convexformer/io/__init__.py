"""Model folders: ``config.json`` beside one safetensors file. Plain numbers and text; loading never executes code."""

from convexformer.io.folder import ModelFileError
from convexformer.io.models import load, save

__all__ = ["ModelFileError", "load", "save"]
