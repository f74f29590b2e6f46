"""Options of the commands, and the data files they read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, final

import numpy as np
import typer

from convexformer.data.files import pick_array, read_arrays
from convexformer.data.stores import open_store

TokensArgument = Annotated[Path, typer.Argument(help="Tokens (N, s, d): npz, npy, safetensors, or a store of embed.")]
TargetsOption = Annotated[Path | None, typer.Option("--targets", help="A file for the targets, if not in TOKENS.")]
XOption = Annotated[str, typer.Option("--x", help="Name of the tokens array.")]
YOption = Annotated[str, typer.Option("--y", help="Name of the targets array.")]
MaskOption = Annotated[str | None, typer.Option("--mask", help="Name of the mask array (N, s), 1 = real token.")]
WeightOption = Annotated[str | None, typer.Option("--weight", help="Name of the sample weights array (N,).")]
ModelArgument = Annotated[Path, typer.Argument(help="A model folder written by `convexformer fit`.")]
HeadOption = Annotated[str, typer.Option(help="attention, self_attention, mlp_mixer, fno, mlp, linear, ...")]
ActivationOption = Annotated[str, typer.Option(help="linear or gated_relu.")]
DecayOption = Annotated[str, typer.Option(help="Attention only: l1 (sparse heads) or l2 (ordinary weight decay).")]
GatesOption = Annotated[int, typer.Option(help="Number of gates, for gated_relu.")]
ToleranceOption = Annotated[float, typer.Option(help="Relative duality gap to certify.")]
LossOption = Annotated[str, typer.Option(help="auto, or the name of a loss.")]
TaskOption = Annotated[str, typer.Option(help="auto (by the targets), classify or regress.")]
MaxIterOption = Annotated[int | None, typer.Option(help="Stop after this many iterations.")]
MaxTimeOption = Annotated[float | None, typer.Option(help="Stop after this many seconds.")]
SolverOption = Annotated[str, typer.Option(help="auto, or the name of a solver: fista, staircase, working_set, ...")]
TotalTimeOption = Annotated[float | None, typer.Option(help="End the whole path after this many seconds.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
SeedOption = Annotated[int, typer.Option(help="Seed of the gates.")]
StandardizeOption = Annotated[bool, typer.Option(help="Centre and scale each channel.")]
InterceptOption = Annotated[bool, typer.Option(help="Fit an unpenalised intercept.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help='Print one JSON object instead of tables; infinity is the string "inf".')
]


@final
class FileData:
    """Tokens, targets, mask and weights from one or two files."""

    def __init__(self, X: Any, y: Any, mask: np.ndarray | None, weight: np.ndarray | None) -> None:
        self.X, self.y, self.mask, self.weight = X, y, mask, weight

    @classmethod
    def read(
        cls, tokens: Path, targets: Path | None, x: str, y: str | None, mask: str | None, weight: str | None
    ) -> FileData:
        """Read the arrays of these names, or open a token store; an error says what the files hold."""
        if tokens.is_dir():
            return cls._of_store(tokens, targets, x, y, mask, weight)
        arrays = read_arrays(tokens)
        labels = None
        if y is not None and targets is not None:
            labels = pick_array(read_arrays(targets), y, "targets", targets)
        elif y is not None:
            if y not in arrays:
                raise ValueError(
                    f"{tokens} has no array {y!r} for the targets; it holds {', '.join(sorted(arrays))}. "
                    "Name it with --y, or give another file with --targets."
                )
            labels = arrays[y]
        inputs = pick_array(arrays, x, "tokens", tokens)
        own_mask = None if mask is None else _exact(arrays, mask, "mask", tokens)
        own_weight = None if weight is None else _exact(arrays, weight, "weights", tokens)
        return cls(inputs, labels, own_mask, own_weight)

    @classmethod
    def _of_store(
        cls, tokens: Path, targets: Path | None, x: str, y: str | None, mask: str | None, weight: str | None
    ) -> FileData:
        """Open a store, which has its mask and, as a rule, its labels; ``x`` names one of several layers."""
        store = open_store(tokens, None if x == "X" else x)
        arrays = read_arrays(targets) if targets is not None else {}
        labels = None
        if y is not None:
            labels = store.labels if targets is None else pick_array(arrays, y, "targets", targets)
            if labels is None:
                raise ValueError(
                    f"{tokens} has no labels; give a file with --targets, or embed a source that has some."
                )
        if mask is not None:
            raise ValueError(f"{tokens} is a token store, which has its own mask; leave out --mask.")
        if weight is not None and targets is None:
            raise ValueError(f"{tokens} has no weights; give the file that has them with --targets.")
        return cls(
            store,
            labels,
            None,
            None if weight is None or targets is None else _exact(arrays, weight, "weights", targets),
        )


def _exact(arrays: dict[str, np.ndarray], name: str, role: str, source: Path) -> np.ndarray:
    if name not in arrays:
        raise ValueError(f"{source} has no array {name!r} for the {role}; it holds {', '.join(sorted(arrays))}.")
    return arrays[name]
