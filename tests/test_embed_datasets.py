"""Texts of Hugging Face datasets: real ones in local folders where the package is installed, messages without it."""

import json
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
from typer.testing import CliRunner

import convexformer as cf
from backbones import sentences, tiny_bert
from convexformer.cli import app
from convexformer.data.stores import StoreError
from convexformer.embedding.sources import read_source

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    os.environ.setdefault("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
    found = pytest.importorskip("datasets", reason="needs the extra [datasets]")
    found.disable_progress_bars()
    return found


def reviews(datasets, texts, labels, names=("neg", "pos")):
    kinds = {"review": datasets.Value("string"), "label": datasets.ClassLabel(names=list(names))}
    return datasets.Dataset.from_dict({"review": texts, "label": labels}, features=datasets.Features(kinds))


# ---------------------------------------------------------------------- folders


def test_a_saved_dataset(tmp_path, datasets):
    reviews(datasets, ["good", "bad", "näher 漢字"], [1, 0, 0]).save_to_disk(tmp_path / "d")
    found = read_source(tmp_path / "d")
    assert found.kind == "text"
    assert found.items == ("good", "bad", "näher 漢字")
    assert found.labels == ("pos", "neg", "neg")
    assert read_source(tmp_path / "d", limit=2).items == ("good", "bad")
    assert read_source(tmp_path / "d", limit=9).items == found.items
    with pytest.raises(ValueError, match="single dataset without it; leave split out"):
        read_source(tmp_path / "d", split="train")
    with pytest.raises(ValueError, match="no column 'words' for the texts; it has 'review', 'label'"):
        read_source(tmp_path / "d", column="words")
    with pytest.raises(ValueError, match="column 'label' holds ClassLabel"):
        read_source(tmp_path / "d", column="label")


def test_splits_and_missing_labels(tmp_path, datasets):
    train, test = reviews(datasets, ["a", "b"], [0, 1], "01"), reviews(datasets, ["c"], [-1], "01")
    datasets.DatasetDict(train=train, test=test, odd=reviews(datasets, ["d", None], [0, -1])).save_to_disk(tmp_path)
    assert read_source(tmp_path, split="train").labels == (0, 1)
    assert read_source(tmp_path, split="test").labels is None
    with pytest.raises(ValueError, match="sample 0 has no label in column 'label'"):
        read_source(tmp_path, split="test", label_column="label")
    with pytest.raises(ValueError, match="sample 1 has no label"):
        read_source(tmp_path, split="odd")
    with pytest.raises(ValueError, match=r"split=None was given; .* has the splits 'train', 'test', 'odd'; name one"):
        read_source(tmp_path)
    with pytest.raises(ValueError, match="split='dev' was given"):
        read_source(tmp_path, split="dev")


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_folders_of_tables(tmp_path, datasets, suffix):
    data = datasets.Dataset.from_dict({"text": ["a", "b"], "y": [0.5, 2.0]})
    for split in ("train", "test"):
        getattr(data, f"to_{suffix}")(tmp_path / f"{split}.{suffix}")
    found = read_source(tmp_path, split="test")
    assert (found.items, found.labels) == (("a", "b"), (0.5, 2.0))
    (tmp_path / f"train.{suffix}").write_bytes(b"")
    with pytest.raises(ValueError, match="cannot be read as a Hugging Face dataset"):
        read_source(tmp_path, split="test")


def test_embedding_a_dataset_is_embedding_its_texts(tmp_path, datasets):
    texts, labels = sentences(7)
    bert = tiny_bert(tmp_path / "bert")
    data = datasets.Dataset.from_dict({"text": texts, "label": labels})
    datasets.DatasetDict(train=data, test=data.select([3])).save_to_disk(tmp_path / "d")
    options = ["--split", "train", "--model", str(bert), "--output", str(tmp_path / "s"), "--json"]
    made = CliRunner().invoke(app, ["embed", str(tmp_path / "d"), *options])
    assert made.exit_code == 0, made.output
    plain = cf.embed(texts, bert, tmp_path / "s", labels=labels)  # the same job: the store is returned, not refused
    assert plain.fingerprint.startswith(json.loads(made.output)["fingerprint"])
    assert plain.texts == texts
    assert plain.labels.tolist() == labels
    with pytest.raises(StoreError, match="another job"):
        cf.embed(tmp_path / "d", bert, tmp_path / "s", split="test")


# ---------------------------------------------------------------------- names


class Hub(ModuleType):
    """What :func:`read_source` asks of the package datasets, without it."""

    def __init__(self, known):
        super().__init__("datasets")
        self.known, self.asked = known, []

    def load_dataset(self, *name):
        self.asked.append(name)
        if name not in self.known:
            raise ConnectionError(f"Couldn't reach {name[0]!r} on the Hub")
        return {"train": Columns(text=["a", "b"], label=[1, 0]), "test": Columns(text=["c"], label=[1])}


class Columns(dict):
    def __init__(self, **columns):
        super().__init__(columns)
        self.column_names = list(columns)
        self.features = dict.fromkeys(columns, SimpleNamespace(dtype="string"))

    def __len__(self):
        return len(self["text"])


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("imdb", [("imdb",)]),
        ("stanfordnlp/imdb", [("stanfordnlp/imdb",)]),
        ("glue/mrpc", [("glue/mrpc",), ("glue", "mrpc")]),
        ("nyu-mll/glue/mrpc", [("nyu-mll/glue", "mrpc")]),
    ],
)
def test_names_are_read_as_owner_name_and_configuration(tmp_path, monkeypatch, source, asked):
    monkeypatch.chdir(tmp_path)
    hub = Hub({("imdb",), ("stanfordnlp/imdb",), ("glue", "mrpc"), ("nyu-mll/glue", "mrpc")})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    found = read_source(source, split="train")
    assert hub.asked == asked
    assert (found.items, found.labels) == (("a", "b"), (1, 0))


def test_names_that_are_not_found_are_explained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub = Hub({})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    with pytest.raises(
        ValueError, match=r"no file or folder here.*reach 'glue/mrcp'.*reach 'glue'.*save_to_disk"
    ) as error:
        read_source("glue/mrcp", split="train")
    assert isinstance(error.value.__cause__, ConnectionError)
    hub.asked.clear()
    (tmp_path / "photos").mkdir()
    for mistyped in ("photos/trian", "texts.csv", "/nowhere", "../nowhere", "a/b/c/d"):  # paths, not names
        with pytest.raises(ValueError, match="does not exist"):
            read_source(mistyped)
    assert hub.asked == []


def test_without_a_network_a_name_is_explained(tmp_path, monkeypatch, datasets):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"no Hugging Face dataset of this name could be read .*ConnectionError"):
        read_source("no-such-dataset-anywhere", split="train")


def test_without_the_package_it_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ValueError, match=r"may name a Hugging Face dataset, but .*pip install 'convexformer\[datasets\]'"
    ):
        read_source("imdb", split="train")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="d is a folder with a dataset, but datasets is not installed"):
        read_source(tmp_path / "d")
    result = CliRunner().invoke(app, ["embed", "imdb", "--split", "train", "--model", "m", "--output", "s"])
    assert result.exit_code == 2
    assert "convexformer[datasets]" in result.output


def test_only_datasets_have_splits(tmp_path):
    (tmp_path / "t.txt").write_text("one\n")
    with pytest.raises(ValueError, match="is no dataset"):
        read_source(tmp_path / "t.txt", split="train")
    with pytest.raises(ValueError, match="a list of texts"):
        read_source(["a"], split="train")
