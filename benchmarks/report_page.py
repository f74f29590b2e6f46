"""The pages of docs/report.md, their pictures and their figures.

``python benchmarks/report_page.py --output runs/report [--pictures docs/images]``: handwritten digits as 16 tokens, once
with the portfolio (``head="auto"``) and once with an attention head, beta chosen by cross-validation, baselines beside them.
Prints the sizes of the pages and the CPU seconds they took; with ``--pictures`` (needs Chromium) they are drawn light, dark
and as printed.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import time
from pathlib import Path

import numpy as np

import convexformer as cf
from convexformer.report.bundle import charts_script


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/report"))
    parser.add_argument("--pictures", type=Path, help="folder for the pictures of the page")
    options = parser.parse_args()

    began = time.process_time()
    bundle = charts_script()
    seconds = time.process_time() - began
    print(f"the charts' script: {len(bundle) / 1e6:.2f} MB, {seconds:.1f} CPU seconds, once a process")
    pages = {head: write(head, options.output / f"{head}.html") for head in ("auto", "attention")}
    if options.pictures is not None:
        draw(pages, options.pictures)


def write(head: str, file: Path) -> Path:
    """Fit the head and write its page."""
    X, y = (part.numpy() for part in cf.data.digits(patch=2))
    pictures = cf.data.digits(patch=1, positions=False).X.numpy().reshape(-1, 8, 8)
    order = np.random.default_rng(0).permutation(len(y))
    train, test = order[:1200], order[1200:]
    model = cf.TokenClassifierCV(head=head, cv=3, n_betas=12, beta_min_ratio=2e-3).fit(X[train], y[train])
    began = time.process_time()
    page = model.report(
        file,
        X[test],
        y[test],
        X_train=X[train],
        y_train=y[train],
        images=list(pictures[test]),
        grid=(4, 4),
        title="Handwritten digits",
    )
    seconds = time.process_time() - began
    size, small = page.stat().st_size, len(gzip.compress(page.read_bytes()))
    print(
        f"{head}: {size / 1e6:.2f} MB ({small / 1e6:.2f} MB compressed), {seconds:.1f} CPU seconds with path and baselines"
    )
    return page


def draw(pages: dict[str, Path], folder: Path) -> None:
    """Take the pictures."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from browser import Browser

    with Browser() as browser:
        for theme, height in (("light", 1500), ("dark", 1500), ("print", 1500)):
            browser.theme(theme)
            browser.open(pages["auto"], width=900 if theme == "print" else 1240)
            browser.picture(folder / f"report_{theme}.png", height=height)
        browser.theme("light")
        browser.open(pages["auto"])
        browser.picture(folder / "report_blocks.png", "#blocks")
        browser.open(pages["attention"])
        browser.picture(folder / "report_convergence.png", "#convergence")
        browser.picture(folder / "report_betas.png", "#betas")
        browser.picture(folder / "report_mistakes.png", "#mistakes", height=720)


if __name__ == "__main__":
    main()
