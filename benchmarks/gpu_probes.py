"""Seconds of ``TokenClassifierCV(head="auto")`` on a GPU, and its test accuracy.

    python benchmarks/gpu_probes.py digits tokens.npz ... [--device cuda] [--json out.json]

Files as in ``benchmarks/probes.py``. Each set is fitted twice: the first fit of a process also loads the GPU's libraries.
Seconds are wall-clock time of the whole ``fit``: maps, kernels, path, folds and the last solve.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path

import torch

import convexformer as cf

sys.path.insert(0, str(Path(__file__).parent))
from probes import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.zeros(1, device=options.device)
    rows = []
    print(f"| set | N, s, d, classes | first fit, s | second fit, s | test | gap | beta_ratio |\n{'|---' * 7}|")
    for name in options.data:
        X, y, mask, X_test, y_test, mask_test = load(name)
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            found = cf.TokenClassifierCV(head="auto", device=options.device).fit(X, y, mask=mask)
            seconds.append(time.perf_counter() - began)
        row = {
            "set": Path(name).stem,
            "sizes": [*X.shape, len(found.classes_)],
            "seconds": seconds,
            "test": 100 * float(found.score(X_test, y_test, mask=mask_test)),
            "gap": found.certificate_.relative_gap,
            "beta_ratio": found.beta_ratio_,
        }
        rows.append(row)
        sizes, (first, second) = ", ".join(map(str, row["sizes"])), seconds
        print(f"| {row['set']} | {sizes} | {first:.1f} | {second:.1f} | {row['test']:.1f} | ", end="")
        print(f"{row['gap']:.1e} | {row['beta_ratio']:.2g} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
