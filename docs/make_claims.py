"""Write docs/claims.md from the recorded results: ``python docs/make_claims.py``.

The table is made from ``docs/results``: the checks in ``claims.json``, and the claims of full runs of the other experiments.
``--measure`` runs the checks first (about two minutes) and writes ``claims.json``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from convexformer import __version__
from convexformer.data.files import write_json
from convexformer.experiments.claims import QUICK, SOURCES, TITLE, run_checks, write_table
from convexformer.experiments.claims_registry import Records
from convexformer.experiments.document import Document

DOCS = Path(__file__).parent


def page() -> str:
    """Return the text of the page."""
    document = Document(TITLE)
    left = ", ".join(name for name in SOURCES if name not in QUICK)
    document.text(
        "Every quantitative or directional claim of five documents: Fisher et al., *Convex Self-Attention Mechanisms*; "
        "Ergen, Neyshabur and Mehta 2022, *Convexifying Transformers*; Sahiner et al. 2022, *Unraveling Attention via "
        "Convex Duality*, and their poster of that title; Sheen et al. 2024, *Implicit Regularization of Gradient Flow on "
        "One-Layer Softmax Attention*. `python docs/make_claims.py` writes this page, from [records](results/claims.json)."
    )
    document.text(
        "*Reproduced* means that our measurement agrees, on the instance or in the setting measured: a numerical check is "
        "evidence for a theorem, not a proof. Runs have five seeds on a GPU, or fewer on a CPU where the row says so. *Not "
        "testable here* gives the reason in the row; *not tested* would be a row without a run of its budget. "
        "`convexformer experiment claims --quick` measures what fits into ten minutes on two "
        f"cores: all checks, and the quick forms of {', '.join(QUICK)}; not {left}, whose rows it leaves open (exit code 4)."
    )
    write_table(document, Records.stored(DOCS / "results", SOURCES))
    return document.markdown()


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="run the checks first")
    if parser.parse_args().measure:
        checks = run_checks(Console(stderr=True))
        write_json(DOCS / "results" / "claims.json", {"convexformer": __version__, "checks": checks}, 1)
    (DOCS / "claims.md").write_text(page())


if __name__ == "__main__":
    main()
