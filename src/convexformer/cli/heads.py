"""Options of heads on the command line: every argument of a head's constructor has one."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, fields
from typing import Annotated, Any, final

import typer

GridOption = Annotated[str | None, typer.Option(help="Grid of the tokens, HEIGHTxWIDTH: poolformer, fno, block_fno.")]
WindowOption = Annotated[int | None, typer.Option(help="Tokens in a window, an odd number: poolformer.")]
BlocksOption = Annotated[str | None, typer.Option(help="Number of channel blocks (block_fno), or lists of channels.")]
HeadOptionOption = Annotated[
    list[str] | None,
    typer.Option(
        "--head-option",
        "-H",
        help="Any argument of the head, NAME=VALUE, again and again: -H window=5, -H heads=mlp,fno, "
        "-H feature=CovariancePooling -H feature.kind=log.",
    ),
]


@final
@dataclass(frozen=True)
class HeadChoice:
    """A head by name with the options that were given."""

    name: str
    activation: str
    decay: str
    gates: int
    grid: str | None = None
    window: int | None = None
    blocks: str | None = None
    more: list[str] | None = None

    def parameters(self, seed: int) -> dict[str, Any]:
        """Return arguments for an estimator: the head by name where that is enough, else as an object."""
        shared = {"activation": self.activation, "decay": self.decay, "gates": self.gates, "random_state": seed}
        own = self._own()
        if not own:
            return {"head": self.name, **shared}
        from convexformer.heads import HEADS

        factory = HEADS[self.name]
        known = _arguments(factory)
        for key in own:
            if key not in known:
                raise ValueError(
                    f"the {self.name} head has no option {key!r}; it has {', '.join(sorted(known)) or 'none'}."
                )
        usual = {"activation": "linear", "decay": "l1", "gates": 16}
        given = {key: value for key, value in shared.items() if key in known and value != usual.get(key)}
        if "seed" in known:
            given["seed"] = seed
        left = {key: value for key, value in shared.items() if key in usual and key not in known}
        return {"head": factory(**{**given, **own}), "random_state": seed, **left}

    def _own(self) -> dict[str, Any]:
        """Return the options that only some heads have."""
        found: dict[str, Any] = {}
        for name in ("grid", "window", "blocks"):
            value = getattr(self, name)
            if value is not None:
                found[name] = parse(value) if isinstance(value, str) else value
        feature: dict[str, Any] = {}
        for text in self.more or ():
            name, equals, value = text.partition("=")
            if not equals:
                raise ValueError(f"--head-option {text!r} was given; expected NAME=VALUE, for example window=5.")
            if name.startswith("feature."):
                feature[name.removeprefix("feature.")] = parse(value)
            else:
                found[name.replace("-", "_")] = parse(value)
        if "feature" in found:
            from convexformer.features import FEATURES

            found["feature"] = FEATURES[found["feature"]](**feature)
        elif feature:
            raise ValueError("options of a feature were given without it; add --head-option feature=NAME.")
        if isinstance(found.get("heads"), str):
            found["heads"] = [part.strip() for part in found["heads"].split(",")]
        return found


def parse(text: str) -> Any:
    """Read ``8x8`` as a grid, Python's numbers, lists, True, False and None as themselves, anything else as text."""
    if re.fullmatch(r"[0-9]+x[0-9]+", text):
        return tuple(int(side) for side in text.split("x"))
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _arguments(factory: Any) -> set[str]:
    try:
        return {field.name for field in fields(factory) if field.init and field.name != "state"}
    except TypeError:  # a function, such as the portfolio
        import inspect

        return set(inspect.signature(factory).parameters)
