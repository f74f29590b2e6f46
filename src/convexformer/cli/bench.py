"""``convexformer bench``: our solvers against Adam on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from convexformer.cli.options import JsonOption
from convexformer.cli.output import Exit, out, print_json, user_errors


def bench(
    samples: Annotated[int, typer.Option(help="N, the number of samples.")] = 1000,
    n_tokens: Annotated[int, typer.Option(help="s, the tokens of a sample.")] = 49,
    width: Annotated[int, typer.Option(help="d, the size of a token.")] = 32,
    beta_ratio: Annotated[float, typer.Option(help="Penalty as a fraction of beta_max.")] = 0.1,
    steps: Annotated[int, typer.Option(help="Steps of Adam, for each of three rates.")] = 300,
    as_json: JsonOption = False,
) -> None:
    """Time our solvers against Adam on synthetic tokens, on this machine; `make bench` has the other tools.

    Example: [bold]convexformer bench --samples 2000 --n-tokens 196 --width 64[/]
    """
    from convexformer.experiments.comparison import compare

    with user_errors():
        for name, value in {"samples": samples, "n-tokens": n_tokens, "width": width, "steps": steps}.items():
            if value < 3:
                raise ValueError(f"--{name} {value} was given; expected at least 3.")
        result = compare(samples, n_tokens, width, beta_ratio, steps)
    if as_json:
        print_json(result)
    else:
        from rich.table import Table

        table = Table(
            "tool", *(f"seconds to {goal:.0e}" for goal in result["goals"]), "gap at the end", title=result["problem"]
        )
        for row in result["rows"]:
            times = ("never" if t is None else f"{t:.3g}" for t in row["seconds"])
            table.add_row(row["tool"], *times, f"{row['gap']:.1e}")
        out.print(table)
    raise typer.Exit(Exit.DONE if result["certified"] else Exit.NOT_CERTIFIED)
