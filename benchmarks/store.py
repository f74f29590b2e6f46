"""A token store larger than memory: fit and certify with little of it, and the pace of a pass against reading the files.

    python benchmarks/store.py --gigabytes 20 --folder /some/disk/store

Writes generated shards (float16 tokens of 1,024 x 32, three classes that differ in a few tokens), reads the files
once without looking at them, passes over the store once, then fits and certifies heads on it, each in a process of its own
whose peak memory is measured. The folder is removed at the end unless --keep.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

import convexformer as cf

TOKENS, WIDTH, CLASSES, BLOCK = 1024, 32, 3, 512
SCORED = 5000  # samples of the training accuracy
HEADS = {
    "linear": {"head": "linear"},
    "mlp, gated": {"head": "mlp", "activation": "gated_relu"},
    "self_attention": {"head": "self_attention", "float32": True},
}


def generate(folder: Path, gigabytes: float) -> None:
    """Noise from one block, shuffled by sample, with a class signal in the first eight tokens."""
    rng = np.random.default_rng(0)
    block = rng.standard_normal((BLOCK, TOKENS, WIDTH), dtype=np.float32).astype(np.float16)
    signal = 0.5 * rng.standard_normal((CLASSES, 8, WIDTH)).astype(np.float16)
    samples = int(gigabytes * 1e9 / (2 * TOKENS * WIDTH))
    with cf.data.StoreWriter(folder, dtype="float16", overwrite=True) as writer:
        for start in range(0, samples, BLOCK):
            n = min(BLOCK, samples - start)
            labels = rng.integers(0, CLASSES, n)
            X = np.roll(block[rng.permutation(BLOCK)[:n]], int(rng.integers(TOKENS)), axis=1)
            X[:, :8] += signal[labels]
            writer.add(X, labels=labels)
        writer.finish()


def drop_cache(folder: Path) -> None:
    """Ask the system to forget the files, so that they are read from the disk."""
    import os

    for file in folder.glob("shard-*"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_files(folder: Path) -> tuple[float, float]:
    """Seconds and CPU seconds to read all shards, block by block."""
    drop_cache(folder)
    start, used = time.perf_counter(), time.process_time()
    for file in sorted(folder.glob("shard-*")):
        with file.open("rb", buffering=0) as data:
            while data.read(1 << 22):
                pass
    return time.perf_counter() - start, time.process_time() - used


def one_pass(folder: Path, verify: bool, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds and CPU seconds of one pass over all batches, with a sum of each."""
    drop_cache(folder)
    stream = cf.data.open(folder, memory=0, verify=verify).stream().to(dtype=dtype)
    start, used = time.perf_counter(), time.process_time()
    total = sum(float(batch.X.sum()) for batch in stream.batches())
    assert np.isfinite(total)
    return time.perf_counter() - start, time.process_time() - used


def fit(folder: Path, name: str) -> dict[str, object]:
    """Fit one head on the store and certify it anew; report seconds and peak memory of this process."""
    torch.set_num_threads(1)
    options = dict(HEADS[name])
    single = options.pop("float32", False)
    store = cf.data.open(folder, memory=0)
    labels, start, used = store.labels, time.perf_counter(), time.process_time()
    if single:  # Gram matrices of all samples in float32; the certificate reads the tokens again, in float64
        stream = store.stream().to(dtype=torch.float32)
        mean, scale = stream.moments()
        problem = cf.Problem(
            str(options["head"]),
            stream.standardized(mean, scale),
            labels,
            beta_ratio=0.1,
            intercept=True,
            dtype=torch.float32,
        )
        solution = cf.solve(problem, tolerance=1e-3)
        proof, kind = solution.certificate, type(problem.operator).__name__
        some = problem.tokens.select(np.arange(SCORED))
        score = float((solution.predict(some).argmax(1).numpy() == labels[:SCORED]).mean())
    else:
        model = cf.TokenClassifier(**options, tolerance=1e-3).fit(store, labels)
        proof, kind = model.certify(store, labels), "gathered"
        score = model.score(store[:SCORED], labels[:SCORED])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "head": name,
        "operator": kind,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - used,
        "relative_gap": proof.relative_gap,
        "certified": proof.meets(1e-3),
        "train_accuracy": score,
        "peak_gigabytes": peak / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=Path("runs/store"))
    parser.add_argument("--heads", nargs="*", default=list(HEADS))
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--fit", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.fit:
        print(json.dumps(fit(arguments.folder, arguments.fit)))
        return
    start = time.perf_counter()
    generate(arguments.folder, arguments.gigabytes)
    store = cf.data.open(arguments.folder)
    size = sum(shard.bytes for shard in store.index.shards)
    print(
        f"{store}: {size / 1e9:.2f} GB in {len(store.index.shards)} shards, written in {time.perf_counter() - start:.0f} s"
    )
    torch.set_num_threads(1)
    raw, raw_cpu = read_files(arguments.folder)
    print(f"reading the files: {raw:.1f} s, {size / raw / 1e9:.2f} GB/s, {raw_cpu:.2f} CPU s")
    for label, verify, dtype in (
        ("first pass, checksums, float64", True, torch.float64),
        ("later pass, float64", False, torch.float64),
        ("later pass, float32", False, torch.float32),
    ):
        seconds, cpu = one_pass(arguments.folder, verify, dtype)
        ratios = f"{seconds / raw:.2f} times reading the files; {cpu:.2f} CPU s, {cpu / raw_cpu:.2f} times"
        print(f"{label}: {seconds:.1f} s, {ratios}")
    for name in arguments.heads:
        drop_cache(arguments.folder)
        command = [sys.executable, __file__, "--folder", str(arguments.folder), "--fit", name]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        print(
            f"{name}: {found['seconds']:.0f} s, peak {found['peak_gigabytes']:.2f} GB, gap {found['relative_gap']:.1e}, "
            f"certified {found['certified']}, training accuracy {found['train_accuracy']:.3f}",
            flush=True,
        )
    if not arguments.keep:
        shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
