"""Options of the commands, and the data files they read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, final

import typer

if TYPE_CHECKING:
    import numpy as np

TokensArgument = Annotated[
    Path, typer.Argument(help="Tokens (N, s, d) or (N, p): npz, npy, pt, safetensors, or a store of embed.")
]
TargetsOption = Annotated[
    Path | None, typer.Option("--targets", help="A file for the targets, if not in TOKENS; csv and tsv too.")
]
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
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite what the output holds already.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help='Print one JSON object instead of tables; infinity is the string "inf".')
]


@final
class FileData:
    """Tokens, targets, mask, weights and groups from one or two files."""

    def __init__(
        self,
        X: Any,
        y: Any,
        mask: np.ndarray | None,
        weight: np.ndarray | None,
        groups: np.ndarray | None = None,
    ) -> None:
        self.X, self.y, self.mask, self.weight, self.groups = X, y, mask, weight, groups

    @classmethod
    def read(
        cls,
        tokens: Path,
        targets: Path | None,
        x: str,
        y: str | None,
        mask: str | None,
        weight: str | None,
        groups: str | None = None,
    ) -> FileData:
        """Read the arrays of these names, or open a token store; an error says what the files hold."""
        from convexformer.data.files import pick_array, read_arrays

        if tokens.is_dir():
            return cls._of_store(tokens, targets, x, y, mask, weight, groups)

        arrays = read_arrays(tokens)
        others = {} if targets is None else read_arrays(targets)
        labels = None
        if y is not None and targets is not None:
            labels = pick_array(others, y, "targets", targets)
        elif y is not None:
            if y not in arrays:
                raise ValueError(
                    f"{tokens} has no array {y!r} for the targets; it holds {', '.join(sorted(arrays))}. "
                    "Name it with --y, or give another file with --targets."
                )
            labels = arrays[y]
        inputs = pick_array(arrays, x, "tokens", tokens)
        both = {**others, **arrays}  # weights and groups may stand beside the targets
        own = [
            None if name is None else _exact(both, name, role, tokens)
            for name, role in ((mask, "mask"), (weight, "weights"), (groups, "groups"))
        ]
        return cls(inputs, labels, *own)

    def fingerprint(self) -> str:
        """Return a hash of tokens, targets, mask and weights, whatever the files and names they came from."""
        from convexformer.data.fingerprint import fingerprint

        X = getattr(self.X, "fingerprint", self.X)  # a token store has one
        parts = {"X": X, "y": self.y, "mask": self.mask, "weight": self.weight}
        return fingerprint({name: values for name, values in parts.items() if values is not None})

    @classmethod
    def _of_store(
        cls,
        tokens: Path,
        targets: Path | None,
        x: str,
        y: str | None,
        mask: str | None,
        weight: str | None,
        groups: str | None,
    ) -> FileData:
        """Open a store, which has its mask and, as a rule, its labels; ``x`` names one of several layers."""
        from convexformer.data.files import pick_array, read_arrays
        from convexformer.data.stores import open_store

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
        if (weight is not None or groups is not None) and targets is None:
            raise ValueError(f"{tokens} has no weights or groups; give the file that has them with --targets.")
        own = [
            None if name is None else _exact(arrays, name, role, targets or tokens)
            for name, role in ((weight, "weights"), (groups, "groups"))
        ]
        return cls(store, labels, None, *own)


def _exact(arrays: dict[str, np.ndarray], name: str, role: str, source: Path) -> np.ndarray:
    if name not in arrays:
        raise ValueError(f"{source} has no array {name!r} for the {role}; it holds {', '.join(sorted(arrays))}.")
    return arrays[name]
