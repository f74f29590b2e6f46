"""Tokens, masks and targets: validation, files, and built-in data sets."""

from convexformer.data.arithmetic import (
    SymbolTask,
    modular_addition,
    modular_division,
    modular_multiplication,
    modular_subtraction,
    periodicity,
)
from convexformer.data.tables import LabelledTokens, digits
from convexformer.data.tokens import TokenDataset

__all__ = [
    "LabelledTokens",
    "SymbolTask",
    "TokenDataset",
    "digits",
    "modular_addition",
    "modular_division",
    "modular_multiplication",
    "modular_subtraction",
    "periodicity",
]
