"""Token stores: what is written is read, damage is found and named, an interrupted writer goes on."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import convexformer as cf
from convexformer.data.stores import StoreError, StoreWriter, TokenStream, read_tokens
from convexformer.data.stores.index import read_index
from convexformer.data.tokens import TokenDataset


def make(folder, n=23, s=4, d=3, *, masked=False, dtype="float64", shard_samples=5, **options):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((n, s, d)) + 0.5
    mask = None
    if masked:
        mask = np.arange(s) < rng.integers(1, s + 1, n)[:, None]
        X[~mask] = 0
    labels = rng.integers(0, 3, n)
    with StoreWriter(folder, dtype=dtype, shard_samples=shard_samples, **options) as writer:
        for a in range(0, n, 7):
            part = slice(a, a + 7)
            names = [f"class {k}" for k in labels[part]]
            writer.add(
                X[part], None if mask is None else mask[part], labels=names, names=[f"{i}.png" for i in range(n)[part]]
            )
        store = writer.finish()
    return store, X, mask, labels


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_what_is_written_is_read(tmp_path, masked, dtype):
    make(tmp_path / "s", masked=masked, dtype=dtype)
    store = cf.data.open(tmp_path / "s")
    _, X, mask, labels = make(tmp_path / "t", masked=masked, dtype=dtype)
    kept = torch.from_numpy(X).to(store.dtype).double()
    assert store.shape == (23, 4, 3)
    assert len(store) == 23
    assert torch.equal(store.load().X, kept)
    assert (store.mask is None) == (mask is None)
    if mask is not None:
        assert np.array_equal(store.mask.numpy(), mask)
    assert store.labels.tolist() == [f"class {k}" for k in labels]
    assert store.names[3] == "3.png"
    assert store.texts is None
    assert [shard.samples for shard in store.index.shards] == [5, 5, 5, 5, 3]
    assert store.fingerprint == cf.data.open(tmp_path / "t").fingerprint
    rows = np.array([22, 0, 7, 7, 13])
    assert torch.equal(store[rows].load().X, kept[torch.from_numpy(rows)])
    assert torch.equal(store[4:11].load().X, kept[4:11])


def test_streams_agree_with_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("convexformer.data.stores.stream.BATCH", 40)  # three samples
    store, X, mask, _ = make(tmp_path / "s", masked=True)
    stream, tokens = TokenStream(store), TokenDataset.of(X, mask)
    w = torch.linspace(0, 2, 23)
    for own, other in zip(stream.moments(w), tokens.moments(w), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-13, atol=1e-13)
    mean, scale = tokens.moments()
    scaled = stream.standardized(mean, scale)
    assert sum(batch.n_samples for batch in scaled.batches()) == 23
    assert len(list(scaled.batches())) == 8
    assert torch.equal(scaled.load().X, tokens.standardized(mean, scale).X)
    torch.testing.assert_close(stream.scatter(mean), tokens.scatter(mean), rtol=1e-13, atol=1e-13)
    assert torch.equal(stream.sampled_tokens(20, 3), tokens.sampled_tokens(20, 3))
    rows = np.array([5, 2, 21])
    assert torch.equal(scaled.select(rows).load().X, tokens.select(rows).standardized(mean, scale).X)
    assert stream.largest() == tokens.largest()
    assert torch.equal(stream.padded(6).load().X[:, :4], tokens.X)
    assert torch.equal(stream.padded(6).mask.sum(1), tokens.mask.sum(1))
    assert stream.to(dtype=torch.float32).load().X.dtype == torch.float32


def test_a_constant_channel_has_the_deviation_one(tmp_path):
    X = np.full((9, 2, 2), 0.1)
    X[:, :, 1] = np.arange(18).reshape(9, 2)
    with StoreWriter(tmp_path / "s", dtype="float64", shard_samples=4) as writer:
        writer.add(X)
        mean, scale = writer.finish().stream().moments()
    assert scale[0] == 1
    assert mean[0] == pytest.approx(0.1, abs=0)


def test_leaving_a_stream_early_stops_its_thread(tmp_path, monkeypatch):
    import threading

    monkeypatch.setattr("convexformer.data.stores.stream.BATCH", 12)
    store, *_ = make(tmp_path / "s")
    before = threading.active_count()
    batches = store.stream().batches()
    next(batches)
    batches.close()
    assert threading.active_count() == before


# ---------------------------------------------------------------------- damage


def test_a_truncated_shard_is_named(tmp_path):
    make(tmp_path / "s")
    file = tmp_path / "s" / "shard-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(StoreError, match=r"shard-00003.safetensors has [\d,]+ bytes; the index says .* truncated"):
        cf.data.open(tmp_path / "s")
    file.unlink()
    with pytest.raises(StoreError, match="misses shard-00003"):
        cf.data.open(tmp_path / "s")


def test_a_changed_shard_is_named(tmp_path):
    make(tmp_path / "s")
    file = tmp_path / "s" / "shard-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    store = cf.data.open(tmp_path / "s")
    with pytest.raises(StoreError, match=r"shard-00002.safetensors does not match its checksum"):
        store.load()
    assert cf.data.open(tmp_path / "s", verify=False).load().X.shape == (23, 4, 3)


def test_a_shard_that_is_replaced_while_the_store_is_open_is_named(tmp_path):
    """One shard at a time is mapped, so a file is opened again and again."""
    make(tmp_path / "s")
    store = cf.data.open(tmp_path / "s", memory=0)
    assert sum(batch.n_samples for batch in store.stream().batches()) == 23
    file = tmp_path / "s" / store.index.shards[0].file
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.unlink()
    file.write_bytes(bytes(data))
    with pytest.raises(StoreError, match="checksum"):
        list(store.stream().batches())


def test_nan_in_a_late_shard_is_named_with_its_row(tmp_path, monkeypatch):
    monkeypatch.setattr("convexformer.data.stores.stream.BATCH", 40)
    X = np.zeros((23, 4, 3))
    X[17, 2, 1] = np.nan
    with StoreWriter(tmp_path / "s", dtype="float32", shard_samples=5) as writer:
        writer.add(X)
        store = writer.finish()
    with pytest.raises(StoreError, match=r"shard-00003.safetensors, row 2 \(sample 17\), token 2, channel 1: nan"):
        store.load()
    with pytest.raises(StoreError, match=r"shard-00003.safetensors, row 2 \(sample 17\)"):
        cf.Problem("mlp", replace_memory(store, 0), np.zeros(23), beta=1.0)


def replace_memory(store, memory):
    return cf.data.open(store.folder, memory=memory)


def test_nan_in_padding_is_no_error(tmp_path):
    X = np.ones((3, 2, 2))
    X[1, 1] = np.nan
    with StoreWriter(tmp_path / "s") as writer:
        writer.add(X, np.array([[1, 1], [1, 0], [1, 1]]))
        assert writer.finish().load().X[1, 1].tolist() == [0, 0]


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/passwd", "shard-00000.safetensors/../x", "..", "sub/shard-00000.safetensors"],
)
def test_names_of_shards_cannot_leave_the_folder(tmp_path, name):
    store, *_ = make(tmp_path / "s")
    shards = (replace(store.index.shards[0], file=name), *store.index.shards[1:])
    (tmp_path / "s" / "index.json").write_text(json.dumps(replace(store.index, shards=shards).to_json()))
    with pytest.raises(StoreError, match="expected a plain name"):
        cf.data.open(tmp_path / "s")


def test_an_edited_index_is_found(tmp_path):
    make(tmp_path / "s")
    file = tmp_path / "s" / "index.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "grid": [2, 2]}))
    with pytest.raises(StoreError, match="fingerprint"):
        cf.data.open(tmp_path / "s")
    file.write_text(json.dumps({**values, "n_samples": 24}))
    with pytest.raises(StoreError, match="23 samples in all, not 24"):
        cf.data.open(tmp_path / "s")
    file.write_text(json.dumps({**values, "n_tokens": -1}))
    with pytest.raises(StoreError, match="positive whole number"):
        cf.data.open(tmp_path / "s")
    file.write_text(file.read_text()[:50])
    with pytest.raises(StoreError, match="not valid JSON"):
        cf.data.open(tmp_path / "s")
    file.write_text("{}")
    with pytest.raises(StoreError, match="was not written by convexformer"):
        cf.data.open(tmp_path / "s")
    file.unlink()
    with pytest.raises(StoreError, match="interrupted; run the same command again"):
        cf.data.open(tmp_path / "s")
    with pytest.raises(StoreError, match="not a folder"):
        cf.data.open(tmp_path / "nothing")


def test_a_shard_with_another_header_is_refused(tmp_path):
    make(tmp_path / "s")
    file = tmp_path / "s" / "shard-00001.safetensors"
    tensors = load_file(file)
    save_file({"Y": tensors["X"]}, file)
    with pytest.raises(StoreError, match=r"shard-00001.safetensors has no tensor 'X'"):
        cf.data.open(tmp_path / "s", verify=False).load()


# ---------------------------------------------------------------------- writing


def test_a_writer_continues_its_own_job_only(tmp_path):
    whole, X, _, _ = make(tmp_path / "whole", job={"model": "m"})
    writer = StoreWriter(tmp_path / "s", dtype="float64", shard_samples=5, job={"model": "m"})
    writer.add(X[:17])
    writer.close()  # as a crash does
    (tmp_path / "s" / ".shard-00003.safetensors.0123456789abcdef.part").write_bytes(b"half")
    with pytest.raises(StoreError, match="another job"):
        StoreWriter(tmp_path / "s", job={"model": "other"})
    with StoreWriter(tmp_path / "s", dtype="float64", shard_samples=5, job={"model": "m"}) as writer:
        assert writer.done == 15
        writer.add(X[15:])
        writer.finish(labels=whole.labels, names=whole.names)
    assert contents(tmp_path / "s") == contents(tmp_path / "whole")
    found = StoreWriter.finished(tmp_path / "s", {"model": "m"})
    assert found.fingerprint == whole.fingerprint
    assert StoreWriter.finished(tmp_path / "s", {"model": "other"}) is None
    with StoreWriter(tmp_path / "s", job={"model": "other"}, overwrite=True) as writer:
        assert writer.done == 0
    assert os.listdir(tmp_path / "s") == ["job.json"]


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_two_writers_do_not_share_a_folder(tmp_path):
    pytest.importorskip("fcntl")
    with StoreWriter(tmp_path / "s", job={}), pytest.raises(StoreError, match="another process is writing"):
        StoreWriter(tmp_path / "s", job={})
    StoreWriter(tmp_path / "s", job={}).close()


def test_batches_must_agree(tmp_path):
    with StoreWriter(tmp_path / "s") as writer:
        writer.add(np.ones((2, 3, 4)))
        with pytest.raises(ValueError, match="All batches must agree"):
            writer.add(np.ones((2, 2, 4)))
        with pytest.raises(ValueError, match="expected tokens"):
            writer.add(np.ones((2, 2)))
        with pytest.raises(ValueError, match="1 labels were given for 2 samples"):
            writer.add(np.ones((2, 3, 4)), labels=[1])
        with pytest.raises(ValueError, match="1 labels were given for 2 samples"):
            writer.finish(labels=[1])
    with pytest.raises(ValueError, match="at least one sample"):
        StoreWriter(tmp_path / "t").finish()
    with pytest.raises(ValueError, match="grid"):
        StoreWriter(tmp_path / "u", grid=(2, 2)).add(np.ones((1, 5, 2)))


def test_layers_side_by_side_are_opened_by_name(tmp_path):
    X = np.arange(24.0).reshape(4, 3, 2)
    with StoreWriter(tmp_path / "s", dtype="float64") as writer:
        writer.add({"layer_2": X, "layer_1": X[..., :1]})
        writer.finish()
    with pytest.raises(StoreError, match="layer_1, layer_2"):
        cf.data.open(tmp_path / "s")
    assert np.array_equal(cf.data.open(tmp_path / "s", "layer_2").load().X, X)
    assert cf.data.open(tmp_path / "s", "layer_1").shape == (4, 3, 1)
    with pytest.raises(StoreError, match="no array 'layer_3'"):
        cf.data.open(tmp_path / "s", "layer_3")


def test_the_limit_of_memory_decides_what_is_streamed(tmp_path):
    make(tmp_path / "s")
    small, large = (
        cf.data.open(tmp_path / "s", memory=23 * 12 * 8),
        cf.data.open(tmp_path / "s", memory=23 * 12 * 8 - 1),
    )
    assert isinstance(read_tokens(small), TokenDataset)
    assert isinstance(read_tokens(large), TokenStream)
    assert isinstance(read_tokens(large, dtype=torch.float32), TokenDataset)
    with pytest.raises(StoreError, match="in memory, of which"):
        TokenDataset.of(large)
    with pytest.raises(ValueError, match="its own mask"):
        read_tokens(large, np.ones((23, 4)))
    assert read_index(tmp_path / "s") == small.index
