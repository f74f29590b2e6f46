"""Bad input: the right exception, with what was given, what was expected and what to do."""

import numpy as np
import pytest
import torch

import convexformer as cf
from convexformer.data import TokenDataset
from convexformer.gauges import GroupNorm
from convexformer.losses import Huber

N, S, D = 6, 3, 2
RNG = np.random.default_rng(30)
X = RNG.standard_normal((N, S, D))
REAL = RNG.standard_normal(N)
LABELS = np.array([0, 1, 2, 0, 1, 2])
SIGNS = np.array([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
NAN, INF = float("nan"), float("inf")


def with_value(array, index, value):
    changed = np.array(array, dtype=float)
    changed[index] = value
    return changed


def build(head="attention", X=X, Y=REAL, **options):
    if "beta" not in options and "beta_ratio" not in options:
        options["beta_ratio"] = 0.1
    return lambda: cf.Problem(head, X, Y, **options)


def solve(**options):
    return lambda: cf.solve(build()(), **options)


def predict(*inputs, **options):
    return lambda: cf.solve(build()()).predict(*inputs, **options)


MASK = np.ones((N, S), dtype=bool)
HIDDEN = MASK.copy()
HIDDEN[2] = False

CASES = {
    # ------------------------------------------------------------------ tokens
    "NaN in X": (
        build(X=with_value(X, (1, 2, 0), NAN)),
        ValueError,
        ["X contains NaN", "1 of 36", "(1, 2, 0)", "mask"],
    ),
    "infinity in X": (build(X=with_value(X, (0, 0, 1), INF)), ValueError, ["X contains NaN or infinity", "(0, 0, 1)"]),
    "NaN under a True mask": (build(X=with_value(X, (1, 2, 0), NAN), mask=MASK), ValueError, ["X contains NaN"]),
    "one axis": (build(X=REAL), ValueError, ["1 axes", "(6,)", "(N, s, d)", "Reshape"]),
    "four axes": (build(X=X[None]), ValueError, ["4 axes", "(1, 6, 3, 2)", "(N, s, d)", "X.shape[-1]"]),
    "uneven nested lists": (build(X=[[[1.0], [2.0]], [[3.0]]]), ValueError, ["X cannot be read", "(s_i, d) arrays"]),
    "no samples": (build(X=X[:0], Y=REAL[:0]), ValueError, ["0 sample(s)", "(0, 3, 2)"]),
    "no tokens": (build(X=X[:, :0]), ValueError, ["0 token(s)", "(6, 0, 2)"]),
    "no features": (build(X=X[:, :, :0]), ValueError, ["0 feature(s)", "(6, 3, 0)"]),
    "empty list": (build(X=[]), ValueError, ["empty list", "at least one"]),
    "text": (build(X=[["a", "b"]]), TypeError, ["X holds", "expected numbers"]),
    "complex": (build(X=X + 1j), ValueError, ["complex", "expected real"]),
    "ragged widths": (build(X=[X[0], X[1][:, :1]]), ValueError, ["different widths", "[1, 2]"]),
    "ragged, one empty": (build(X=[X[0], X[1][:0]], Y=REAL[:2]), ValueError, ["X[1] has no tokens", "drop"]),
    "ragged with a mask": (build(X=list(X), mask=MASK), ValueError, ["makes its own mask", "mask=None"]),
    "dataset with a mask": (build(X=TokenDataset.of(X), mask=MASK), ValueError, ["its own mask"]),
    "unknown device": (build(device="tpu9"), ValueError, ["unknown device 'tpu9'", "'cpu'"]),
    "half precision": (build(dtype=torch.float16), ValueError, ["torch.float16", "torch.float64"]),
    "token_shape": (lambda: TokenDataset.of(X[:, 0], token_shape=(3, 2)), ValueError, ["(3, 2)", "needs 6", "has 2"]),
    # ------------------------------------------------------------------ masks
    "mask of another shape": (build(mask=MASK[:, :2]), ValueError, ["(6, 2)", "(6, 3)", "True where a token is real"]),
    "mask of twos": (build(mask=2 * MASK), ValueError, ["other than 0 and 1", "expected booleans"]),
    "everything masked": (build(mask=HIDDEN), ValueError, ["1 samples", "every token masked", "sample 2", "Drop"]),
    # ------------------------------------------------------------------ targets
    "Y too short": (build(Y=REAL[:4]), ValueError, ["6 samples", "Y has 4", "(6, 3, 2)", "(4,)"]),
    "Y scalar": (build(Y=3.0), ValueError, ["no axis", "must match"]),
    "Y None": (build(Y=None), ValueError, ["Y is None", "expected targets"]),
    "Y text": (build(Y=["cat"] * N), TypeError, ["text", "integer labels", "np.unique"]),
    "Y of four axes": (build(Y=np.zeros((N, S, 1, 1))), ValueError, ["(6, 3, 1, 1)", "(N, s, c)"]),
    "NaN in Y": (build(Y=with_value(REAL, 3, NAN)), ValueError, ["Y contains NaN", "1 of 6", "(3,)"]),
    "infinity in Y": (build(Y=with_value(REAL, 0, -INF)), ValueError, ["Y contains NaN or infinity"]),
    "NaN in Y of a real token": (
        build("mlp", Y=with_value(np.zeros((N, S, 1)), (0, 1, 0), NAN), mask=MASK),
        ValueError,
        ["Y contains NaN"],
    ),
    "complex Y": (build(Y=REAL + 1j, loss="squared"), ValueError, ["complex", "real targets"]),
    "per token, linear": (build("linear", Y=np.zeros((N, S, 2))), ValueError, ["per token", "linear head", "'mlp'"]),
    "per token, other length": (build("mlp", Y=np.zeros((N, 5, 2))), ValueError, ["(6, 5, 2)", "s=3"]),
    "one class": (build(Y=np.zeros(N, dtype=int)), ValueError, ["one class only (0)", "at least two"]),
    "one sign": (build(Y=np.ones(N), loss="logistic"), ValueError, ["one class only (+1)", "both classes"]),
    "float labels": (build(Y=LABELS.astype(float), loss="cross_entropy"), TypeError, ["float64", "integer labels"]),
    "negative labels": (build(Y=SIGNS.astype(int)), ValueError, ["contain -1", "0..c-1", "loss='logistic'"]),
    "enormous label": (build(Y=LABELS * 10**6), ValueError, ["2000000", "np.unique"]),
    "labels 0/1 for the logistic loss": (
        build(Y=LABELS % 2, loss="logistic"),
        ValueError,
        ["[0.0, 1.0]", "labels -1 and +1", "2 * Y - 1"],
    ),
    "two columns of signs": (
        build(Y=np.stack([SIGNS, SIGNS], 1), loss="squared_hinge"),
        ValueError,
        ["(6, 2)", "one label", "cross_entropy"],
    ),
    "rows that are no probabilities": (
        build(Y=np.full((N, 3), 0.5), loss="cross_entropy"),
        ValueError,
        ["row 0", "sums to 1.5", "probabilities"],
    ),
    "negative probabilities": (
        build(Y=np.tile([1.5, -0.5], (N, 1)), loss="cross_entropy"),
        ValueError,
        ["smallest entry -0.5", "nonnegative"],
    ),
    "one column of probabilities": (build(Y=np.ones((N, 1)), loss="cross_entropy"), ValueError, ["1 column", "two"]),
    "integer matrix": (build(Y=np.zeros((N, 4), dtype=int)), ValueError, ["(6, 4)", "loss='auto'", "loss='squared'"]),
    "a class without sample": (
        build(Y=np.array([0, 2, 0, 2, 0, 2]), intercept=True),
        ValueError,
        ["classes [1]", "minus infinity", "intercept=False"],
    ),
    "a class without weight": (
        build(Y=LABELS, intercept=True, sample_weight=(LABELS != 1).astype(float)),
        ValueError,
        ["classes [1]", "positive weight"],
    ),
    "a sign without weight": (
        build(Y=SIGNS, loss="logistic", intercept=True, sample_weight=(SIGNS > 0).astype(float)),
        ValueError,
        ["class -1", "positive weight", "intercept=False"],
    ),
    # ------------------------------------------------------------------ weights
    "negative weights": (build(sample_weight=-np.ones(N)), ValueError, ["negative", "-1", "expected weights >= 0"]),
    "weights too short": (build(sample_weight=np.ones(4)), ValueError, ["(4,)", "(6,)", "one weight per sample"]),
    "weights NaN": (build(sample_weight=with_value(np.ones(N), 1, NAN)), ValueError, ["sample_weight contains NaN"]),
    "weights zero": (build(sample_weight=np.zeros(N)), ValueError, ["zero for every sample", "at least one positive"]),
    # ------------------------------------------------------------------ beta
    "beta zero": (build(beta=0.0), ValueError, ["beta=0.0", "positive"]),
    "beta negative": (build(beta=-1), ValueError, ["beta=-1", "positive"]),
    "beta NaN": (build(beta=NAN), ValueError, ["beta=nan", "finite"]),
    "beta infinite": (build(beta=INF), ValueError, ["beta=inf", "finite"]),
    "beta text": (build(beta="0.1"), TypeError, ["beta is a str", "positive number"]),
    "beta True": (build(beta=True), TypeError, ["beta is a bool"]),
    "beta_ratio zero": (build(beta_ratio=0), ValueError, ["beta_ratio=0", "positive"]),
    "beta_ratio NaN": (build(beta_ratio=NAN), ValueError, ["beta_ratio=nan"]),
    "both betas": (build(beta=1.0, beta_ratio=0.1), ValueError, ["both", "beta=1.0", "beta_ratio=0.1", "exactly one"]),
    "neither beta": (
        lambda: cf.Problem("attention", X, REAL),
        ValueError,
        ["neither", "exactly one", "beta_ratio=0.1"],
    ),
    "with_beta zero": (lambda: build()().with_beta(0.0), ValueError, ["beta=0.0"]),
    # ------------------------------------------------------------------ names
    "unknown head": (build("atention"), ValueError, ["unknown head 'atention'", "mean 'attention'?", "linear", "mlp"]),
    "head of another type": (build(3), TypeError, ["head is a int", "convexformer.heads"]),
    "head class, not object": (build(cf.heads.Attention), TypeError, ["head is a", "expected a name or an object"]),
    "unknown loss": (build(loss="squard"), ValueError, ["unknown loss 'squard'", "mean 'squared'?", "huber"]),
    "loss of another type": (build(loss=1.0), TypeError, ["loss is a float", "convexformer.losses"]),
    "unknown solver": (solve(solver="fist"), ValueError, ["unknown solver 'fist'", "mean 'fista'?", "auto"]),
    "unknown activation": (
        lambda: cf.heads.Attention("gated"),
        ValueError,
        ["unknown activation 'gated'", "'gated_relu'?", "linear"],
    ),
    "relu in a sum": (
        lambda: cf.heads.Sum([cf.heads.MLP("relu")]),
        ValueError,
        ["cannot be part of a sum", "gated_relu"],
    ),
    "unknown decay": (lambda: cf.heads.Attention(decay="l3"), ValueError, ["unknown decay 'l3'", "l1", "l2"]),
    "unknown groups": (lambda: GroupNorm("tokens"), ValueError, ["unknown groups 'tokens'", "mean 'token'?"]),
    "delta": (lambda: Huber(0.0), ValueError, ["delta=0.0", "positive"]),
    # ------------------------------------------------------------------ gates
    "no gates": (lambda: cf.heads.Attention("gated_relu", gates=0), ValueError, ["gates=0", "at least one"]),
    "gates True": (lambda: cf.heads.MLP("gated_relu", gates=True), TypeError, ["gates is a bool"]),
    "half a gate": (lambda: cf.heads.Attention("gated_relu", gates=1.5), TypeError, ["float", "tuple of 2 arrays"]),
    "one array of gates": (lambda: cf.heads.Attention("gated_relu", gates=np.ones((2, 3))), TypeError, ["2 arrays"]),
    "u1 of another shape": (
        build(cf.heads.Attention("gated_relu", gates=(np.ones((2, 4)), np.ones((2, D))))),
        ValueError,
        ["gates[0] (u1)", "(2, 4)", "(g, 3)"],
    ),
    "u2 of another shape": (
        build(cf.heads.Attention("gated_relu", gates=(np.ones((2, S)), np.ones(D)))),
        ValueError,
        ["gates[1] (u2)", "(2,)", "(g, 2)"],
    ),
    "as many u1 as u2": (
        build(cf.heads.Attention("gated_relu", gates=(np.ones((2, S)), np.ones((3, D))))),
        ValueError,
        ["2 vectors u1", "3 vectors u2"],
    ),
    "MLP gates of another shape": (
        build(cf.heads.MLP("gated_relu", gates=np.ones((2, 5)))),
        ValueError,
        ["gates has shape (2, 5)", "(g, 2)"],
    ),
    "NaN in gates": (
        build(cf.heads.MLP("gated_relu", gates=np.full((2, D), NAN))),
        ValueError,
        ["gates contains NaN"],
    ),
    # ------------------------------------------------------------------ options of solve
    "tolerance zero": (solve(tolerance=0), ValueError, ["tolerance=0", "positive", "1e-4"]),
    "tolerance negative": (solve(tolerance=-1e-3), ValueError, ["tolerance=-0.001"]),
    "tolerance NaN": (solve(tolerance=NAN), ValueError, ["tolerance=nan"]),
    "tolerance text": (solve(tolerance="tight"), ValueError, ["tolerance=tight"]),
    "max_iter zero": (solve(max_iter=0), ValueError, ["max_iter=0", "positive whole number"]),
    "max_iter half": (solve(max_iter=1.5), ValueError, ["max_iter=1.5"]),
    "max_time zero": (solve(max_time=0), ValueError, ["max_time=0", "positive seconds"]),
    "warm_start of another type": (solve(warm_start="zero"), TypeError, ["warm_start is a str", "Solution"]),
    "warm_start of another shape": (solve(warm_start=torch.zeros(2, 2)), ValueError, ["(2, 2)", "expects (3, 2, 1)"]),
    "warm_start NaN": (solve(warm_start=torch.full((S, D, 1), NAN)), ValueError, ["warm_start contains NaN"]),
    "working sets without slices": (
        lambda: cf.solve(build("mlp")(), solver="working_set"),
        ValueError,
        ["solver='working_set'", "each token position or each gate", "solver='auto'"],
    ),
    # ------------------------------------------------------------------ using a solution
    "predict, other width": (predict(np.ones((2, S, 5))), ValueError, ["d=5", "fitted with d=2", "embedding"]),
    "predict, too many tokens": (predict(np.ones((2, 4, D))), ValueError, ["4 tokens", "fitted with 3", "Truncate"]),
    "predict, too few tokens": (predict(np.ones((2, 1, D))), ValueError, ["1 tokens", "fitted with 3", "mask"]),
    "predict, NaN": (predict(np.full((2, S, D), NAN)), ValueError, ["X contains NaN"]),
    "lift of something else": (lambda: cf.lift(torch.nn.Linear(1, 1)), TypeError, ["cannot lift a Linear"]),
}


@pytest.mark.parametrize(("call", "kind", "words"), CASES.values(), ids=CASES.keys())
def test_bad_input_is_refused_with_help(call, kind, words):
    with pytest.raises(kind) as error:
        call()
    assert type(error.value) is kind
    for word in words:
        assert word in str(error.value)


def test_a_missing_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device is available; use device='cpu'"):
        build(device="cuda")()


# ---------------------------------------------------------------------- what is not bad input


def test_anything_may_stand_at_masked_positions():
    mask = MASK.copy()
    mask[1, 2] = mask[4, 0] = False
    clean = np.where(mask[..., None], X, 0.0)
    for junk in (NAN, INF, 1e300):
        dirty = np.where(mask[..., None], X, junk)
        for head in ("attention", "mlp", "linear"):
            one, two = (cf.solve(cf.Problem(head, x, REAL, beta_ratio=0.1, mask=mask)) for x in (clean, dirty))
            assert torch.equal(one.weights.Z, two.weights.Z)
            assert torch.equal(one.predict(clean, mask), one.predict(dirty, mask))
            assert torch.equal(one.network()(clean, mask), one.network()(dirty, mask))


def test_targets_of_masked_tokens_may_be_anything():
    mask = MASK.copy()
    mask[1, 2] = False
    clean, dirty = np.zeros((N, S, 1)), np.zeros((N, S, 1))
    clean[:, 0] = dirty[:, 0] = 1.0
    dirty[1, 2] = NAN
    one, two = (cf.solve(cf.Problem("mlp", X, Y, beta_ratio=0.1, mask=mask)) for Y in (clean, dirty))
    assert torch.equal(one.weights.Z, two.weights.Z)


@pytest.mark.parametrize(
    "as_is", [np.asarray, torch.as_tensor, lambda x: x.tolist(), np.asfortranarray, lambda x: x[::1]]
)
def test_tokens_may_be_arrays_tensors_or_lists(as_is):
    assert torch.equal(cf.Problem("attention", as_is(X), REAL, beta=1.0).tokens.X, torch.from_numpy(X))


def test_integers_booleans_and_reversed_views_are_read():
    counts = np.arange(36).reshape(6, 3, 2)
    assert cf.Problem("attention", counts, REAL, beta=1.0).tokens.X.dtype == torch.float64
    assert torch.equal(cf.Problem("attention", X[::-1], REAL, beta=1.0).tokens.X, torch.from_numpy(X[::-1].copy()))
    assert cf.Problem("attention", X, LABELS > 0, beta=1.0).layout.n_outputs == 2


def test_one_weight_serves_all_samples():
    for weight in (2.0, np.float32(2.0), torch.tensor(2.0)):
        assert build(beta=1.0, sample_weight=weight)().objective.sample_weight.tolist() == [2.0] * N


def test_two_axes_are_one_token_a_sample():
    flat = cf.Problem("attention", X.reshape(N, -1), REAL, beta=1.0)
    assert tuple(flat.tokens.X.shape) == (6, 1, 6)


def test_ragged_lists_keep_the_finest_dtype():
    tokens = TokenDataset.of([np.ones((2, 2), dtype=int), np.full((1, 2), 0.5), np.ones((3, 2), dtype=int)])
    assert tokens.X[1, 0].tolist() == [0.5, 0.5]
    assert tokens.mask.tolist() == [[True, True, False], [True, False, False], [True, True, True]]


@pytest.mark.parametrize(
    ("Y", "loss", "outputs"),
    [
        (REAL, "squared", 1),
        (np.stack([REAL, REAL], 1), "squared", 2),
        (LABELS, "cross_entropy", 3),
        (LABELS.astype(np.uint8), "cross_entropy", 3),
        (torch.from_numpy(LABELS), "cross_entropy", 3),
    ],
)
def test_auto_chooses_the_loss_by_the_targets(Y, loss, outputs):
    problem = build(Y=Y)()
    assert problem.loss.name == loss
    assert problem.layout.n_outputs == outputs
