"""Embedding with tiny random backbones: what the store holds is what the model returns, and kills do not change it."""

import json
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import convexformer as cf
from backbones import need_transformers, sentences, tiny_bert, tiny_timm, tiny_vit, write_images, write_table
from convexformer.cli import app
from convexformer.data.stores import StoreError
from convexformer.embedding.sources import read_source
from convexformer.embedding.vision import _of_config

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return tiny_bert(tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    return tiny_vit(tmp_path_factory.mktemp("models") / "tiny-vit")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    pytest.importorskip("PIL")
    return write_images(tmp_path_factory.mktemp("data") / "images")


# ---------------------------------------------------------------------- sources


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_tables_of_texts(tmp_path, suffix):
    texts, labels = ['a "quoted" cat, and more', "näher 漢字"], ["x", "y"]
    file = tmp_path / f"t{suffix}"
    if suffix == ".jsonl":
        file.write_text("\n".join(json.dumps({"text": t, "label": k}) for t, k in zip(texts, labels, strict=True)))
    elif suffix == ".tsv":
        file.write_text("text\tlabel\n" + "".join(f"{t}\t{k}\n" for t, k in zip(texts, labels, strict=True)))
    else:
        write_table(file, texts, labels)
    found = read_source(file)
    assert found.kind == "text"
    assert list(found.items) == texts
    assert list(found.labels) == labels


def test_labels_are_numbers_where_all_are(tmp_path):
    assert read_source(write_table(tmp_path / "a.csv", ["u", "v"], ["0", "1"])).labels == (0, 1)
    assert read_source(write_table(tmp_path / "b.csv", ["u", "v"], ["0.5", "1"])).labels == (0.5, 1.0)
    assert read_source(write_table(tmp_path / "c.csv", ["u", "v"], ["0", "one"])).labels == ("0", "one")
    assert read_source(write_table(tmp_path / "d.csv", ["u", "v"], ["007", "1"])).labels == ("007", "1")


def test_lines_and_lists_of_texts(tmp_path):
    (tmp_path / "t.txt").write_text("one\n\ntwo\n")
    assert read_source(tmp_path / "t.txt").items == ("one", "two")
    assert read_source(["a", "b"], [1, 2]).labels == (1, 2)
    assert read_source(["a", "b"], [1, 2], limit=1).labels == (1,)


def test_folders_and_tables_of_images(tmp_path, images):
    found = read_source(images)
    assert found.kind == "image"
    assert found.labels == ("left",) * 6 + ("right",) * 6
    assert found.names[:2] == ("left/0.png", "left/1.png")
    table = images.parent / "t.csv"
    table.write_text("file,label\nimages/right/1.png,r\nimages/left/0.png,l\n")
    listed = read_source(table)
    assert listed.names == ("images/right/1.png", "images/left/0.png")
    assert listed.labels == ("r", "l")
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "0.png").write_bytes((images / "left" / "0.png").read_bytes())
    assert read_source(tmp_path / "flat").labels is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "words,label\nx,1\n", "no column text or .*it has 'words', 'label'"),
        ("t.csv", "text,label\nx,1\ny,\n", "sample 1 has no label"),
        ("t.csv", "text,label\n", "holds no samples"),
        ("t.jsonl", '{"text": "x"}\nnot json\n', "line 2 is not JSON"),
        ("t.jsonl", '{"text": "x"}\n{"text": 3}\n', "sample 1: column 'text' holds 3"),
        ("t.csv", "file\nnowhere.png\n", "names the image nowhere.png, which does not exist"),
        ("t.xml", "", "suffix '.xml'"),
        ("t.txt", "\n", "no samples"),
    ],
)
def test_bad_sources_are_explained(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_source(tmp_path / name)


def test_more_bad_sources(tmp_path, images):
    with pytest.raises(ValueError, match="does not exist"):
        read_source(tmp_path / "nothing")
    with pytest.raises(ValueError, match="holds no images"):
        read_source(tmp_path)
    with pytest.raises(ValueError, match="labels were given"):
        read_source(["a"], [1, 2])
    with pytest.raises(TypeError, match="sample 1 is a int"):
        read_source(["a", 2])
    with pytest.raises(ValueError, match="labels of its own"):
        read_source(images, [1] * 12)


# ---------------------------------------------------------------------- texts


def hidden_states(folder, text):
    transformers = need_transformers()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder)
    with torch.no_grad():
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        return model(input_ids=ids, output_hidden_states=True), tokenizer.convert_ids_to_tokens(ids[0].tolist())


def test_tokens_of_texts_are_those_of_the_model(tmp_path, bert):
    texts, labels = sentences(11)
    store = cf.embed(texts, bert, tmp_path / "s", labels=labels, layers="1,-1,last", batch_size=4)
    lengths = [len(text.split()) + 2 for text in texts]
    assert store.shape == (11, max(lengths), 48)
    assert store.mask.sum(1).tolist() == lengths
    assert store.labels.tolist() == labels
    assert store.texts == texts
    assert store.class_token == 0
    assert store.grid is None
    assert store.backbone.model == "tiny-bert"
    assert store.backbone.layers == ("1", "-1", "last")
    X = store.load().X
    for k in (0, 7, 10):
        states, pieces = hidden_states(bert, texts[k])
        expected = torch.cat([states.hidden_states[1], states.hidden_states[-1], states.last_hidden_state], 2)[0]
        torch.testing.assert_close(X[k, : lengths[k]].float(), expected, rtol=1e-4, atol=1e-5)
        assert store.pieces[k] == pieces
        assert not X[k, lengths[k] :].any()


def test_special_pieces_are_dropped_or_marked(tmp_path, bert):
    texts, _ = sentences(5)
    kept = cf.embed(texts, bert, tmp_path / "k", batch_size=5)
    dropped = cf.embed(texts, bert, tmp_path / "d", batch_size=5, class_token="drop")
    marked = cf.embed(texts, bert, tmp_path / "m", batch_size=5, class_token="mark")
    assert dropped.mask.sum(1).tolist() == [len(text.split()) for text in texts]
    assert dropped.class_token is None
    assert torch.equal(dropped.load().X[0, :3], kept.load().X[0, 1:4])
    assert marked.shape[2] == 17
    assert marked.load().X[:, 0, 16].tolist() == [1] * 5
    assert not marked.load().X[:, 1:, 16].any()
    with pytest.raises(ValueError, match=r"text 1 \(''\) has no pieces"):
        cf.embed([texts[0], ""], bert, tmp_path / "e", class_token="drop")


def test_long_texts_are_cut(tmp_path, bert):
    store = cf.embed(["cat " * 50, "dog"], bert, tmp_path / "s", max_length=8)
    assert store.shape[1] == 8
    assert cf.embed(["a cat", "dog"], bert, tmp_path / "p", max_length=8, pad=True).shape[1] == 8


def test_layers_side_by_side(tmp_path, bert):
    texts, labels = sentences(4)
    cf.embed(texts, bert, tmp_path / "s", layers=[1, 3], combine="separate", labels=labels)
    with pytest.raises(StoreError, match="layer_1, layer_3"):
        cf.data.open(tmp_path / "s")
    assert cf.data.open(tmp_path / "s", "layer_3").shape[2] == 16


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_precisions(tmp_path, bert, precision, dtype):
    texts, _ = sentences(3)
    full = cf.embed(texts, bert, tmp_path / "f").load().X
    store = cf.embed(texts, bert, tmp_path / "s", precision=precision, dtype=dtype)
    assert store.index.dtype == dtype
    assert float((store.load().X - full).abs().max()) < 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": "7"}, "has the layers 0 to 3 and 'last'"),
        ({"layers": "six"}, "expected numbers or 'last'"),
        ({"layers": "1,1"}, "each of them once"),
        ({"combine": "add"}, "concatenate"),
        ({"class_token": "hide"}, "keep"),
        ({"precision": "int8"}, "bfloat16"),
        ({"dtype": "int8"}, "float16"),
        ({"batch_size": 0}, "positive"),
    ],
)
def test_bad_options_are_explained(tmp_path, bert, options, message):
    with pytest.raises(ValueError, match=message):
        cf.embed(["a cat"], bert, tmp_path / "s", **options)
    assert not (tmp_path / "s" / "index.json").exists()


def test_a_folder_without_a_model_is_explained(tmp_path):
    need_transformers()
    with pytest.raises(ValueError, match="cannot be read as a Hugging Face model"):
        cf.embed(["a"], tmp_path, tmp_path / "s")


def test_another_job_does_not_replace_a_store(tmp_path, bert):
    texts, _ = sentences(6)
    first = cf.embed(texts, bert, tmp_path / "s", shard_samples=2, batch_size=2)
    stamp = (tmp_path / "s" / "shard-00000.safetensors").stat().st_mtime_ns
    assert cf.embed(texts, bert, tmp_path / "s", shard_samples=2, batch_size=2).fingerprint == first.fingerprint
    assert (tmp_path / "s" / "shard-00000.safetensors").stat().st_mtime_ns == stamp  # nothing was written
    with pytest.raises(StoreError, match="another job"):
        cf.embed(texts[:3], bert, tmp_path / "s")
    assert len(cf.embed(texts[:3], bert, tmp_path / "s", overwrite=True)) == 3


# ---------------------------------------------------------------------- images


def test_tokens_of_images_are_those_of_the_model(tmp_path, vit, images):
    transformers = need_transformers()
    from PIL import Image

    store = cf.embed(images, vit, tmp_path / "s", batch_size=5)
    assert store.shape == (12, 17, 16)
    assert store.grid == (4, 4)
    assert store.class_token == 0
    assert store.labels.tolist() == ["left"] * 6 + ["right"] * 6
    assert store.names[11] == "right/5.png"
    picture = Image.open(images / "right" / "5.png").convert("RGB").resize((16, 16), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.asarray(picture, np.float32) / 127.5 - 1).permute(2, 0, 1)[None]
    with torch.no_grad():
        expected = transformers.AutoModel.from_pretrained(vit)(pixel_values=pixels).last_hidden_state[0]
    torch.testing.assert_close(store.load().X[11].float(), expected, rtol=1e-4, atol=1e-5)
    dropped = cf.embed(images, vit, tmp_path / "d", batch_size=5, class_token="drop", layers=2)
    assert dropped.shape == (12, 16, 16)
    assert dropped.class_token is None


def test_an_unreadable_image_is_named(tmp_path, vit, images):
    (tmp_path / "i" / "a").mkdir(parents=True)
    (tmp_path / "i" / "a" / "0.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"0.png cannot be read as an image"):
        cf.embed(tmp_path / "i", vit, tmp_path / "s")


def test_preprocessing_of_configurations():
    clip = {"size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": {"height": 224, "width": 224}}
    found = _of_config({**clip, "resample": 3}, 999)
    assert (found.size, found.crop, found.resample, found.squash) == ((224, 224), 0.875, "bicubic", False)
    plain = _of_config({}, 32)
    assert (plain.size, plain.squash, plain.mean) == ((32, 32), True, (0.5, 0.5, 0.5))
    assert _of_config({"size": 24, "do_normalize": False}, 32).std == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("layers", ["last", "1,2"])
def test_vision_transformers_of_timm(tmp_path, images, layers):
    arguments = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    folder = tiny_timm(tmp_path / "m", **arguments)
    store = cf.embed(images, folder, tmp_path / "s", layers=layers, batch_size=5)
    assert store.shape == (12, 17, 16 if layers == "last" else 32)
    assert store.grid == (4, 4)
    assert store.class_token == 0
    dropped = cf.embed(images, folder, tmp_path / "d", layers=layers, batch_size=5, class_token="drop")
    assert torch.equal(dropped.load().X, store.load().X[:, 1:])


def test_convolutional_networks_of_timm(tmp_path, images):
    folder = tiny_timm(tmp_path / "m", "efficientnet_lite0", size=64)
    store = cf.embed(images, folder, tmp_path / "s", batch_size=6)
    assert store.shape == (12, 4, 1280)
    assert store.grid == (2, 2)
    assert store.class_token is None
    assert cf.embed(images, folder, tmp_path / "t", layers=4).shape == (12, 16, 112)
    with pytest.raises(ValueError, match="different numbers of tokens"):
        cf.embed(images, folder, tmp_path / "u", layers="3,4")
    with pytest.raises(ValueError, match="layers 1 to 5"):
        cf.embed(images, folder, tmp_path / "v", layers="9")


# ---------------------------------------------------------------------- activations


def test_activations_of_a_layer(tmp_path, bert):
    texts, labels = sentences(7)
    table = write_table(tmp_path / "t.tsv", texts, [int(label == "cat") for label in labels])
    options = ["embed", str(table), "--model", str(bert), "--activations", "2", "--batch-size", "3"]
    result = CliRunner().invoke(app, [*options, "--output", str(tmp_path / "a.safetensors"), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["heads"] == 2
    found = load_file(tmp_path / "a.safetensors")
    s = max(len(text.split()) for text in texts) + 2
    assert found["attention"].shape == (7, 2, s, s)
    k, n = 4, len(texts[4].split()) + 2
    states, _ = hidden_states(bert, texts[k])
    torch.testing.assert_close(found["X_in"][k, :n], states.hidden_states[1][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["X_out"][k, :n], states.hidden_states[2][0], rtol=1e-4, atol=1e-5)
    maps, mask = found["attention"][k], found["mask"][k]
    assert mask.sum() == n
    torch.testing.assert_close(maps[:, :n].sum(2), torch.ones(2, n))
    assert not maps[:, n:].any()
    assert not maps[:, :, n:].any()
    assert found["labels"].tolist() == [int(label == "cat") for label in labels]
    assert found["ids"][k, 0] == 2
    bad = CliRunner().invoke(app, [*options[:5], "9", "--output", str(tmp_path / "b.safetensors")])
    assert bad.exit_code == 2
    assert "the layers 1 to 3" in bad.output


# ---------------------------------------------------------------------- the command line


def test_embed_then_fit_then_predict(tmp_path, bert):
    texts, labels = sentences(60)
    table = write_table(tmp_path / "t.tsv", texts, labels)
    run = CliRunner().invoke
    made = run(app, ["embed", str(table), "--model", str(bert), "--output", str(tmp_path / "s"), "--json"])
    assert made.exit_code == 0, made.output
    assert json.loads(made.output)["classes"] == 3
    store, model = str(tmp_path / "s"), str(tmp_path / "model")
    fitted = run(app, ["fit", store, "--head", "auto", "--tolerance", "1e-2", "--output", model, "--json"])
    assert fitted.exit_code == 0, fitted.output
    facts = json.loads(fitted.output)
    assert facts["certified"]
    assert facts["validation_score"] > 0.8
    proof = run(app, ["certify", model, store, "--json"])
    assert proof.exit_code == 0, proof.output
    predicted = run(app, ["predict", model, store, "--output", str(tmp_path / "p.csv")])
    assert predicted.exit_code == 0, predicted.output
    plain = run(app, ["fit", store, "--head", "self_attention", "--output", model, "--json", "--force"])
    assert plain.exit_code == 0, plain.output
    assert run(app, ["fit", store, "--mask", "m", "--force", "--output", model]).exit_code == 2
    assert run(app, ["fit", store, "--x", "layer_9", "--force", "--output", model]).exit_code == 2
    cf.embed(texts[:4], bert, tmp_path / "unlabelled")
    missing = run(app, ["fit", str(tmp_path / "unlabelled"), "--force", "--output", model])
    assert missing.exit_code == 2
    assert "has no labels" in missing.output


# ---------------------------------------------------------------------- kills


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def embed_alone(table, bert, folder):
    torch.set_num_threads(1)
    cf.embed(table, bert, folder, batch_size=3, shard_samples=6)


def killed_and_resumed(tmp_path, bert, kills):
    """Embed once as it should be, and once with ``kills`` runs that end at random moments; return both folders."""
    texts, labels = sentences(300)
    table = write_table(tmp_path / "t.tsv", texts, labels)
    embed_alone(table, bert, tmp_path / "whole")
    rng, progress = np.random.default_rng(0), []
    for _ in range(kills):
        process = multiprocessing.get_context("fork").Process(
            target=embed_alone, args=(table, bert, tmp_path / "killed")
        )
        before = count(tmp_path / "killed")
        process.start()
        while process.is_alive() and count(tmp_path / "killed") <= before:
            time.sleep(0.001)  # the model is being loaded
        time.sleep(rng.uniform(0, 0.008))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        progress.append(count(tmp_path / "killed"))
    embed_alone(table, bert, tmp_path / "killed")
    return tmp_path / "whole", tmp_path / "killed", progress


def count(folder):
    return len(list(folder.glob("shard-*")))


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_job_is_completed_to_the_same_bytes(tmp_path, bert, kills):
    threads = torch.get_num_threads()
    whole, killed, progress = killed_and_resumed(tmp_path, bert, kills)
    torch.set_num_threads(threads)
    assert progress == sorted(progress)
    assert 0 < progress[0] <= progress[-1] < 50
    assert contents(whole) == contents(killed)
