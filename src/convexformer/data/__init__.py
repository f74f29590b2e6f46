"""Tokens, masks and targets: validation, stores on disk, files, and built-in data sets."""

from convexformer.data.arithmetic import (
    SymbolTask,
    modular_addition,
    modular_division,
    modular_multiplication,
    modular_subtraction,
    periodicity,
)
from convexformer.data.stores import Backbone, StoreError, StoreWriter, TokenStore
from convexformer.data.stores import open_store as open
from convexformer.data.tables import LabelledTokens, digits
from convexformer.data.tokens import TokenDataset

__all__ = [
    "Backbone",
    "LabelledTokens",
    "StoreError",
    "StoreWriter",
    "SymbolTask",
    "TokenDataset",
    "TokenStore",
    "digits",
    "modular_addition",
    "modular_division",
    "modular_multiplication",
    "modular_subtraction",
    "open",
    "periodicity",
]
