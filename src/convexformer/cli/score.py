"""``convexformer score``: how good a fitted model is on labelled tokens."""

from __future__ import annotations

from typing import Any

from convexformer.cli.models import load_estimator
from convexformer.cli.options import (
    FileData,
    JsonOption,
    MaskOption,
    ModelArgument,
    TargetsOption,
    TokensArgument,
    WeightOption,
    XOption,
    YOption,
)
from convexformer.cli.output import show, user_errors


def score(
    model: ModelArgument,
    tokens: TokensArgument,
    targets: TargetsOption = None,
    x: XOption = "X",
    y: YOption = "y",
    mask: MaskOption = None,
    weight: WeightOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score a fitted model on other data: accuracy, or R^2 of a regression.

    Example: [bold]convexformer score model test.npz[/]
    """
    with user_errors():
        estimator: Any = load_estimator(model)
        data = FileData.read(tokens, targets, x, y, mask, weight)
        value = estimator.score(data.X, data.y, sample_weight=data.weight, mask=data.mask)
    metric = "accuracy" if hasattr(estimator, "classes_") else "R^2"
    show({"model": str(model), "metric": metric, "score": value, "samples": len(data.X)}, as_json, "scored")
