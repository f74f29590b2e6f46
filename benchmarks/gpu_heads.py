"""Certified heads at the size of Sahiner et al. on one GPU: pooled cross-entropy, N=50,000, s=196, d=c=100, 100 gates.

    PYTHONPATH=src python benchmarks/gpu_heads.py --json out.json
    PYTHONPATH=src python benchmarks/gpu_heads.py --only "self_attention" "gated fno"      # some parts
    PYTHONPATH=src python benchmarks/gpu_heads.py --N 500 --s 16 --d 16 --c 10 --gates 4 --device cpu    # a smoke run
    PYTHONPATH=src OMP_NUM_THREADS=2 python benchmarks/gpu_heads.py --N 1000 --s 65 --d 128 --c 10 --gates 16 --blocks 2 \\
        --device cpu --dtype float64 --only "gated fno" "gated block_fno" "gated mlp_mixer" "gated self_attention"

Data is made on the device: token means and covariances depend on the class. A cold solve counts everything from the
tokens on: building the operator, beta_max, the iterations, the float64 certificate. Gated heads are timed stage by stage:
the operator, beta_max, the certificate of zero weights, a solve of at most ``--max-time`` seconds. Memory is the peak of
what torch allocated beyond the tokens, and ``peak_over_tokens`` the same as a multiple of them.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
import warnings

import torch

import convexformer as cf
from convexformer.operators import BilinearOperator, LowRank
from convexformer.weights import Weights

HEADS = {
    "self_attention": lambda a: cf.heads.SelfAttention(),
    "mlp_mixer": lambda a: cf.heads.MLPMixer(),
    "mlp, gated": lambda a: cf.heads.MLP(activation="gated_relu", gates=16),
    "fno": lambda a: cf.heads.FNO(),
    "gated fno": lambda a: cf.heads.FNO("gated_relu", gates=a.gates),
    "gated block_fno": lambda a: cf.heads.BlockFNO("gated_relu", blocks=a.blocks, gates=a.gates),
    "gated mlp_mixer": lambda a: cf.heads.MLPMixer("gated_relu", gates=a.gates),
    "gated self_attention": lambda a: cf.heads.SelfAttention("gated_relu", gates=a.gates),
}
DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "benchmarks.md"
MILLION = "self_attention, a million samples"
PARTS = [*HEADS, MILLION]
GATED = [name for name in HEADS if name.startswith("gated ")]


def make(N, s, d, c, device, seed=0):
    g = torch.Generator(device=device).manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=g, device=device)  # noqa: E731
    mean, factor = 0.3 * randn(c, d), randn(c, 6, d) / d**0.5
    y = torch.randint(0, c, (N,), generator=g, device=device)
    X = torch.empty(N, s, d, device=device)
    for start in range(0, N, 2000):
        rows = slice(start, min(start + 2000, N))
        k = y[rows]
        x = 0.5 * randn(len(k), s, d) + mean[k][:, None] + 1.5 * randn(len(k), s, 6) @ factor[k]
        X[rows] = x / x.norm(dim=(1, 2), keepdim=True)
    return X, y


class Stages:
    """Seconds and peak memory of one stage after another."""

    def __init__(self, X, device):
        self.device, self.tokens, self.row = device, X.nbytes, {}
        self.held = torch.cuda.memory_allocated() if device == "cuda" else 0
        self.started = self._now()

    def _now(self):
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def __call__(self, stage, work):
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began, cpu = self._now(), time.process_time()
        result = work()
        self.row[f"{stage}_s"] = self._now() - began
        if self.device == "cpu":  # of all threads; seconds of a clock say little on a machine that others use
            self.row[f"{stage}_cpu_s"] = time.process_time() - cpu
        if self.device == "cuda":
            peak = torch.cuda.max_memory_allocated() - self.held
            self.row[f"{stage}_peak_GB"] = peak / 1e9
            self.row["peak_over_tokens"] = max(self.row.get("peak_over_tokens", 0.0), peak / self.tokens)
        print(f"    {stage}: {self.row[f'{stage}_s']:.2f} s", flush=True)
        return result


def report(solution, stages, X, y):
    proof = solution.certificate
    stages.row |= {
        "solver": solution.solver,
        "status": solution.status.name,
        "iterations": solution.n_iter,
        "relative_gap": proof.relative_gap,
        "kind": proof.kind,
        "terms": getattr(solution.weights.Z, "n_terms", None),
        "solver_s": solution.history[-1].seconds - solution.history[0].seconds,
        "history": [(r.iteration, round(r.seconds, 3), r.relative_gap) for r in solution.history][-12:],
    }
    sample = slice(0, 10_000)
    stages.row["train_accuracy"] = float((solution.predict(X[sample]).argmax(1) == y[sample]).double().mean())


def run(head, X, y, a):
    """A cold solve, from the tokens to the certificate."""
    stages = Stages(X, a.device)
    problem = stages(
        "build_and_beta_max",
        lambda: cf.Problem(head, X, y, beta_ratio=a.ratio, device=a.device, dtype=getattr(torch, a.dtype)),
    )
    solution = stages("solve", lambda: cf.solve(problem, tolerance=a.tolerance, max_time=a.max_time))
    stages.row["total_s"] = stages.row["build_and_beta_max_s"] + stages.row["solve_s"]
    report(solution, stages, X, y)
    return stages.row


def run_in_stages(head, X, y, a, *, fit):
    """A gated head: what it takes to build, to find beta_max, to certify a point, and what a solve reaches in time."""
    stages = Stages(X, a.device)
    problem = stages("build", lambda: cf.Problem(head, X, y, beta=1.0, device=a.device, dtype=getattr(torch, a.dtype)))
    stages.row["gates"] = type(getattr(problem.operator, "gates", None)).__name__
    stages.row["beta_max"] = stages("beta_max", lambda: problem.beta_max)
    problem = problem.with_beta(a.ratio * problem.beta_max)
    A = problem.operator
    zero = Weights(LowRank.zeros(A.weight_shape, A.like) if isinstance(A, BilinearOperator) else A.zeros())
    proof = stages("certificate_of_zero", lambda: cf.certify(zero, problem))
    polar = (1 + proof.kkt["feasibility"]) * problem.beta
    stages.row |= {
        "gap_of_zero": proof.relative_gap,
        "kind_of_zero": proof.kind,
        "polar_above_estimate": polar / problem.beta_max - 1,  # what rounding and the proof cost
    }
    print(f"    polar above its estimate: {stages.row['polar_above_estimate']:.1e}, {proof.kind}", flush=True)
    if fit:
        solution = stages("solve", lambda: cf.solve(problem, tolerance=a.gated_tolerance, max_time=a.max_time))
        report(solution, stages, X, y)
    return stages.row


def table(rows):
    """The stages of gated heads as Markdown; on a CPU in seconds of its time, since others may use the machine."""
    cpu = "build_cpu_s" in rows[0]
    kind, last = ("cpu_s", "all") if cpu else ("s", "peak memory beyond the tokens")
    lines = [f"| head | build | beta_max | certificate of zero | fit | {last} |", "|---|---|---|---|---|---|"]
    for row in rows:
        seconds = {stage: row.get(f"{stage}_{kind}") for stage in ("build", "beta_max", "certificate_of_zero", "solve")}
        cells = [f"{seconds['build']:.1f} s", f"{seconds['beta_max']:.1f} s"]
        cells.append(f"{seconds['certificate_of_zero']:.1f} s ({row['kind_of_zero']})")
        done = "" if row.get("status") in (None, "CONVERGED") else f", {row['status']}"
        fitted = seconds["solve"] is not None
        cells.append(
            f"{seconds['solve']:.1f} s, gap {row['relative_gap']:.1e} ({row['kind']}{done})" if fitted else "-"
        )
        total = sum(value for value in seconds.values() if value is not None)
        peak = max((value for key, value in row.items() if key.endswith("_peak_GB")), default=0.0)
        lines.append(f"| {' | '.join([row['head'], *cells, f'{total:.0f} s' if cpu else f'{peak:.0f} GB'])} |")
    return "\n".join(lines)


def document(results, name):
    """Write the table of gated heads in a file of results into docs/benchmarks.md, between its markers."""
    text = DOCUMENT.read_text()
    before, rest = text.split(f"<!-- {name}: begin -->\n")
    after = rest.split(f"<!-- {name}: end -->")[1]
    rows = [row for row in json.loads(results.read_text())["rows"] if row["head"] in GATED and "error" not in row]
    DOCUMENT.write_text(f"{before}<!-- {name}: begin -->\n{table(rows)}\n<!-- {name}: end -->{after}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, default in (
        ("--N", 50_000),
        ("--s", 196),
        ("--d", 100),
        ("--c", 100),
        ("--gates", 100),
        ("--blocks", 10),
    ):
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--million", type=int, nargs=4, default=(1_000_000, 49, 64, 10), metavar=("N", "s", "d", "c"))
    parser.add_argument("--ratio", type=float, default=0.1)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--gated-tolerance", type=float, default=1e-2)
    parser.add_argument("--max-time", type=float, default=60.0, help="seconds of a solve; a certificate comes on top")
    parser.add_argument("--fit", nargs="*", choices=GATED, default=GATED, help="gated heads to fit; others stop before")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--repeat", type=int, default=2, help="the first run of a process pays for loading kernels")
    parser.add_argument("--json")
    parser.add_argument("--document", nargs=2, metavar=("RESULTS", "MARKER"), help="only write docs/benchmarks.md")
    a = parser.parse_args()
    if a.document:
        document(pathlib.Path(a.document[0]), a.document[1])
        return
    warnings.simplefilter("ignore")
    rows, data = [], None
    for name in a.only:
        sizes = tuple(a.million) if name == MILLION else (a.N, a.s, a.d, a.c)
        if data is None or data[0] != sizes:
            data = None  # free the other tokens first
            data = (sizes, *make(*sizes, a.device))
        _, X, y = data
        gated = name in GATED
        head = cf.heads.SelfAttention() if name == MILLION else HEADS[name](a)
        print(f"{name}: tokens {tuple(X.shape)}, {X.nbytes / 1e9:.2f} GB", flush=True)
        for turn in range(1 if gated else a.repeat):
            row = {"head": name, "turn": turn, "tokens_GB": X.nbytes / 1e9}
            try:
                row |= run_in_stages(head, X, y, a, fit=name in a.fit) if gated else run(head, X, y, a)
            except torch.OutOfMemoryError as problem:
                row["error"] = str(problem).splitlines()[0]
            rows.append(row)
            print(
                {k: (round(v, 4) if isinstance(v, float) and "gap" not in k else v) for k, v in row.items()},
                flush=True,
            )
            if a.json:  # after every row: a run that is cut short has left its figures
                with open(a.json, "w") as file:
                    json.dump({"config": vars(a), "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
