"""Tokens in: validation, masks and built-in data sets."""

from convexformer.data.tables import LabelledTokens, digits
from convexformer.data.tokens import TokenDataset

__all__ = ["LabelledTokens", "TokenDataset", "digits"]
