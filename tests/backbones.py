"""Tiny random backbones, written as local model folders by the libraries that read them, and small sources for them."""

import csv
import json

import numpy as np
import pytest
import torch

ANIMALS = ["cat", "dog", "owl"]
WORDS = [
    *ANIMALS,
    "the",
    "a",
    "sat",
    "ran",
    "flew",
    "on",
    "under",
    "mat",
    "log",
    "moon",
    "tree",
    "slowly",
    "and",
    "again",
]


def need_transformers():
    return pytest.importorskip("transformers", reason="needs the extra [text]")


def need_timm():
    """Import timm, which needs torchvision. PyPI's is built for CUDA and misses two operators beside a torch for CPUs."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    KEPT.append(library)  # declarations live as long as this
    return pytest.importorskip("timm", reason="needs the extra [vision]")


KEPT: list[torch.library.Library] = []


def tiny_bert(folder, *, layers=3, width=16, heads=2, seed=0):
    """A random BERT with a tokenizer of whole words."""
    transformers = need_transformers()
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: k for k, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=2 * width,
        max_position_embeddings=64,
    )
    torch.manual_seed(seed)
    transformers.BertModel(config).eval().save_pretrained(folder)
    return folder


def tiny_vit(folder, *, layers=3, width=16, image=16, patch=4):
    """A random vision transformer of transformers with its preprocessing."""
    transformers = need_transformers()
    config = transformers.ViTConfig(
        image_size=image,
        patch_size=patch,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * width,
    )
    torch.manual_seed(0)
    transformers.ViTModel(config).eval().save_pretrained(folder)
    size = {"height": image, "width": image}
    facts = {"size": size, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2, "do_normalize": True}
    (folder / "preprocessor_config.json").write_text(json.dumps(facts))
    return folder


def tiny_timm(folder, name="vit_tiny_patch16_224", size=16, **arguments):
    """A random model of timm, as a folder that timm reads."""
    timm = need_timm()
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=0, **arguments)
    folder.mkdir(parents=True)
    save_file(model.state_dict(), folder / "model.safetensors")
    facts = {"input_size": [3, size, size], "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bilinear"}
    config = {"architecture": name, "num_classes": 0, "model_args": arguments}
    config["pretrained_cfg"] = {**facts, "crop_pct": 1.0, "num_classes": 0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def sentences(n, seed=0):
    """Texts of 3 to 9 words with their class, the animal in it."""
    rng = np.random.default_rng(seed)
    animals = rng.choice(ANIMALS, n)
    texts = [" ".join(["the", animal, *rng.choice(WORDS[3:], rng.integers(1, 8))]) for animal in animals]
    return texts, animals.tolist()


def write_table(file, texts, labels):
    with file.open("w", newline="") as out:
        writer = csv.writer(out, delimiter="\t" if file.suffix == ".tsv" else ",")
        writer.writerow(["text", "label"])
        writer.writerows(zip(texts, labels, strict=True))
    return file


def write_images(folder, n=6, size=(20, 18)):
    """``n`` pictures of each of two classes: noise that is bright at the left or at the right."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for name in ("left", "right"):
        (folder / name).mkdir(parents=True)
        for k in range(n):
            pixels = rng.integers(0, 80, (*size, 3))
            half = slice(None, size[1] // 2) if name == "left" else slice(size[1] // 2, None)
            pixels[:, half] += 150
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{k}.png")
    return folder
