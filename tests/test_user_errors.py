"""What users pass by mistake: each an error that names the class, what was given, and what to do."""

import json
import warnings
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.model_selection import GridSearchCV
from torch.utils.data import DataLoader, TensorDataset

import convexformer as cf
from convexformer.registry import ClassTokenWarning

RNG = np.random.default_rng(0)
X = RNG.standard_normal((24, 4, 3))
Y = np.arange(24) % 3
LOOSE = {"tolerance": 0.1, "beta_ratio": 0.2}


def fit(X=X, y=Y, **options):
    return lambda: cf.TokenClassifier(**{**LOOSE, **options}).fit(X, y)


def predict(other):
    return lambda: cf.TokenClassifier(**LOOSE).fit(X, Y).predict(other)


class ModelOutput(dict):
    """As of transformers: a dictionary with attributes."""

    last_hidden_state = torch.from_numpy(X)


OUTPUT = ModelOutput(last_hidden_state=torch.from_numpy(X), attentions=None)
LOADER = DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=8)
IDS = RNG.integers(0, 30_000, (24, 7))
WHO = "TokenClassifier"

MISTAKES = {
    "a model output": (fit(OUTPUT), TypeError, [WHO, "X is a ModelOutput", "X.last_hidden_state"]),
    "an object with hidden states": (
        fit(SimpleNamespace(last_hidden_state=X)),
        TypeError,
        [WHO, "X is a SimpleNamespace", "X.last_hidden_state"],
    ),
    "a dictionary": (
        fit({"patches": X, "cls": X[:, 0]}),
        TypeError,
        [WHO, "X is a dict with patches, cls", "X['patches']"],
    ),
    "a loader": (fit(LOADER), TypeError, [WHO, "X is a DataLoader", "torch.cat"]),
    "a generator": (fit(x for x in X), TypeError, [WHO, "X is a generator", "list(X)"]),
    "a column of arrays": (
        fit(pd.Series(list(X))),
        TypeError,
        [WHO, "X is a Series", "column of arrays", "np.stack(X)"],
    ),
    "a column of ragged arrays": (
        fit(pd.Series([x[: 1 + k % 4] for k, x in enumerate(X)])),
        TypeError,
        [WHO, "Pass list(X)"],
    ),
    "token ids": (fit(IDS), ValueError, [WHO, "(24, 7) of int64", "token ids", "Embed them"]),
    "token ids of torch": (fit(torch.from_numpy(IDS)), ValueError, [WHO, "torch.int64", "token ids"]),
    "a single sample to predict": (predict(X[0]), ValueError, [WHO, "(4, 3)", "4 tokens of size 3", "X[None]"]),
    "a single sample to fit": (fit(X[0], Y[:1]), ValueError, ["4 samples and y has 1", "single sample", "X[None]"]),
    "other channels": (predict(X[:, :, :2]), ValueError, [WHO, "d=2", "fitted with d=3", "same embedding"]),
    "one-hot labels": (fit(y=np.eye(3, dtype=int)[Y]), ValueError, [WHO, "(24, 3)", "one-hot", "y.argmax(1)"]),
    "one-hot labels, as many as tokens": (
        fit(y=np.eye(4, dtype=int)[np.arange(24) % 4]),
        ValueError,
        [WHO, "(24, 4)", "y.argmax(1)", "labels of tokens", "(N, s, c) floats"],
    ),
    "rows that are no probabilities": (fit(y=X[:, 0]), ValueError, [WHO, "(24, 3)", "sums to", "TokenRegressor"]),
    "labels of another number of tokens": (fit(y=np.ones((24, 7), int)), ValueError, [WHO, "(24, 7)", "s=4 tokens"]),
    "soft labels with class weights": (
        fit(y=np.full((24, 3), 1 / 3), class_weight="balanced"),
        ValueError,
        ["class_weight='balanced'", "soft labels", "sample_weight"],
    ),
    "soft labels with a hinge": (
        fit(y=np.full((24, 2), 0.5), loss="squared_hinge"),
        ValueError,
        ["squared_hinge", "cross_entropy"],
    ),
    "a head class": (fit(head=cf.heads.Attention), TypeError, [WHO, "the class Attention", "head=Attention()"]),
    "a head class in a problem": (
        lambda: cf.Problem(cf.heads.MLP, X, Y, beta=1.0),
        TypeError,
        ["head is a class, MLP", "MLP()"],
    ),
    "a number as head": (fit(head=3), TypeError, [WHO, "a int as head", "convexformer.heads"]),
    "a sum of nothing": (fit(head="sum"), ValueError, [WHO, "head='sum'", "cf.heads.Sum(["]),
    "a kernel of nothing": (fit(head="kernel"), ValueError, [WHO, "head='kernel'", "cf.heads.Kernel("]),
    "decay of an MLP": (fit(head="mlp", decay="l2"), ValueError, [WHO, "decay='l2'", "mlp head", "activation, gates"]),
    "activation of a linear head": (fit(head="linear", activation="gated_relu"), ValueError, [WHO, "linear head"]),
    "activation besides a head": (
        fit(head=cf.heads.MLP(), activation="gated_relu"),
        ValueError,
        [WHO, "activation='gated_relu'", "besides the head MLP(", "would do nothing", "to the head itself"],
    ),
    "two options besides a head": (
        fit(head=cf.heads.Linear(), decay="l2", gates=3),
        ValueError,
        ["decay='l2' and gates=3", "they would do nothing"],
    ),
    "an unknown keyword": (
        lambda: cf.TokenClassifier(tolerence=1e-3),
        TypeError,
        [WHO, "'tolerence'", "mean 'tolerance'?"],
    ),
    "an unknown keyword of a search": (
        lambda: cf.TokenRegressorCV(beta=1.0),
        TypeError,
        ["TokenRegressorCV", "'beta'"],
    ),
    "an unknown option of the head": (
        lambda: cf.TokenClassifier(head="poolformer").set_params(head__windw=5),
        ValueError,
        ["option of the poolformer head", "mean 'window'?"],
    ),
    "as many gates as a float has": (
        lambda: cf.heads.MLP("gated_relu", gates=1e12),
        ValueError,
        ["gates=1", "at most 1,000,000"],
    ),
    "a trillion gates": (fit(activation="gated_relu", gates=10**12), ValueError, ["gates=1000000000000", "at most"]),
    "some gates and a half": (
        lambda: cf.heads.MLP("gated_relu", gates=2.5),
        TypeError,
        ["float (2.5)", "whole number"],
    ),
}


@pytest.mark.parametrize(("call", "kind", "words"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_explained(call, kind, words):
    with pytest.raises(kind) as error:
        call()
    for word in words:
        assert word in str(error.value)


GRIDS = {
    "poolformer": cf.heads.PoolFormer(grid=(4, 4)),
    "fno": cf.heads.FNO(grid=(4, 4)),
    "block_fno": cf.heads.BlockFNO(blocks=1, grid=(4, 4)),
}


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_and_one_token_ask_about_the_class_token(name):
    with pytest.raises(ValueError, match=r"there are 17 tokens.*class token.*X\[:, 1:\]"):
        cf.Problem(GRIDS[name], RNG.standard_normal((6, 17, 2)), RNG.standard_normal(6), beta=1.0)


@pytest.mark.parametrize("name", ["poolformer", "fno", "fnet"])
def test_one_token_more_than_a_square_asks_about_the_class_token(name):
    tokens, y = RNG.standard_normal((6, 17, 2)), RNG.standard_normal(6)
    with pytest.warns(ClassTokenWarning, match=r"17 = 1 \+ 4 x 4 tokens: is one of them a class token"):
        cf.Problem(name, tokens, y, beta=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cf.Problem(name, tokens[:, 1:], y, beta=1.0)
        cf.Problem("mlp", tokens, y, beta=1.0)


@pytest.mark.parametrize("shape", [[4, 3], [10**9, 3, 3], [4, 3, 10**12]], ids=str)
def test_a_falsified_shape_in_a_model_file(tmp_path, shape):
    cf.save(cf.TokenClassifier(**LOOSE).fit(X, Y), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["body"]["solution"]["shape"] = shape
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(cf.ModelFileError, match="said to have the shape"):
        cf.load(tmp_path)


# ---------------------------------------------------------------------- options of heads in a search


@pytest.mark.parametrize("head", ["attention", cf.heads.Attention()], ids=["name", "object"])
def test_options_of_the_head_in_a_grid_search(head):
    search = GridSearchCV(cf.TokenClassifier(head, **LOOSE), {"head__decay": ["l1", "l2"]}, cv=2).fit(X, Y)
    used = search.best_estimator_.solution_.head
    assert used.decay == search.best_params_["head__decay"]
    both = cf.TokenClassifier("poolformer", activation="gated_relu", **LOOSE).set_params(head__window=5, head__gates=2)
    assert both.fit(X, Y).solution_.head.config() == {
        "activation": "gated_relu", "window": 5, "grid": None, "gates": 2, "seed": 0,
    }  # fmt: skip
    assert cf.TokenClassifier(cf.heads.Attention(decay="l2")).get_params()["head__decay"] == "l2"


# ---------------------------------------------------------------------- soft labels and labels of tokens


def test_soft_labels():
    P = RNG.dirichlet(np.ones(3), 24)
    probe = cf.TokenClassifier(beta_ratio=0.1, tolerance=1e-5).fit(X, P)
    assert probe.classes_.tolist() == [0, 1, 2]
    assert probe.certificate_.meets(1e-5)
    assert probe.certify(X, P).meets(1e-5)
    assert probe.predict_proba(X).shape == (24, 3)
    assert probe.score(X, P) == (probe.predict(X) == P.argmax(1)).mean()
    # certain probabilities are labels
    sure, labels = (cf.TokenClassifier(beta_ratio=0.1, tolerance=1e-7).fit(X, y) for y in (np.eye(3)[Y], Y))
    assert sure.certificate_.primal == pytest.approx(labels.certificate_.primal, rel=1e-6)
    two = cf.TokenClassifier(**LOOSE).fit(X, np.stack([P[:, 0], 1 - P[:, 0]], 1))
    assert two.decision_function(X).shape == (24,)
    assert np.allclose(two.predict_proba(X).sum(1), 1)


def test_labels_of_tokens(tmp_path):
    words = np.array(["noun", "verb", "other"])
    mask = np.arange(4) < RNG.integers(1, 5, 24)[:, None]
    labels = words[(X[..., 0] > 0).astype(int) + (X[..., 1] > 1)]
    probe = cf.TokenClassifier("mlp", beta_ratio=0.02, tolerance=1e-5).fit(X, np.where(mask, labels, "junk"), mask=mask)
    assert probe.classes_.tolist() == ["noun", "other", "verb"]
    assert probe.certify(X, labels, mask=mask).meets(1e-5)
    found = probe.predict(X, mask)
    assert found.shape == (24, 4)
    assert probe.score(X, labels, mask=mask) == pytest.approx((found == labels)[mask].mean())
    assert probe.predict_proba(X, mask).shape == (24, 4, 3)
    ragged = [x[own] for x, own in zip(X, mask, strict=True)]
    again = cf.TokenClassifier("mlp", beta_ratio=0.02, tolerance=1e-5)
    again.fit(ragged, [y[own] for y, own in zip(labels, mask, strict=True)])
    assert again.certificate_.primal == pytest.approx(probe.certificate_.primal, rel=1e-4)
    cf.save(probe, tmp_path)
    assert (cf.load(tmp_path).predict(X, mask) == found).all()
    two = cf.TokenClassifier("mlp", **LOOSE).fit(X, np.where(X[..., 0] > 0, "in", "out"))
    assert two.predict(X).shape == two.decision_function(X).shape == (24, 4)


def test_soft_labels_and_labels_of_tokens_in_a_search():
    P = RNG.dirichlet(np.ones(3), 24)
    tokens = np.array(["a", "b"])[(X[..., 0] > 0).astype(int)]
    for head, y in (("attention", P), ("mlp", tokens)):
        search = cf.TokenClassifierCV(head, n_betas=3, beta_min_ratio=0.1, cv=2, tolerance=0.01).fit(X, y)
        assert 0 <= search.best_score_ <= 1
