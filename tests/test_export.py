"""Networks people can ship: traced, compiled, mapped, empty batches, and files that other runtimes read."""

import copy
import io
import json

import numpy as np
import pytest
import torch
from torch import nn

import convexformer as cf
from cases import ALL_HEADS, EVEN_LOSSES, random_data
from convexformer.io.shipping import _portable, _quiet, export
from convexformer.weights import Weights

S, D, C = 4, 2, 2
F = cf.features
FEATURES = {
    "mean": F.MeanPooling(),
    "flatten": F.Flatten(),
    "class token": F.ClassToken(),
    "covariance sqrt": F.CovariancePooling(),
    "covariance log": F.CovariancePooling("log"),
    "covariance raw": F.CovariancePooling("raw"),
    "covariance of few channels": F.CovariancePooling(max_channels=1),
    "queries": F.SoftmaxQueries(3),
    "random features": F.RandomFeatures(F.MeanPooling(), n_features=64),
}


def recovered(problem, seed=0):
    """The network of random weights: recovery and tracing do not care whether they are optimal."""
    Z = torch.randn(problem.operator.weight_shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    bias = torch.ones(C, dtype=torch.float64) if problem.intercept else None
    return problem.head.recover(Weights(Z, bias), problem.layout)


def every_network():
    """Name -> (network, whether it takes a mask)."""
    made = {}
    for name, case in ALL_HEADS.items():
        data = random_data(case, EVEN_LOSSES["squared, 2 outputs"], "intercept", np.random.default_rng(0), 6, S, D)
        problem = cf.Problem(case.build(data.gates), data.X, data.Y, beta=1.0, **data.options)
        made[name] = recovered(problem), case.masks
    rng = np.random.default_rng(1)
    X, Y = rng.standard_normal((12, S, D)), rng.standard_normal((12, C))
    heads = {f"feature {name}": cf.heads.Feature(feature) for name, feature in FEATURES.items()}
    for kernel in ("linear", "gaussian"):
        heads[f"{kernel} kernel"] = cf.heads.Kernel(F.CovariancePooling(), kernel=kernel)
    heads["learned sum"] = cf.heads.Sum([heads["feature mean"], "attention"], weights="learned")
    for name, head in heads.items():
        made[name] = recovered(cf.Problem(head, X, Y, beta=1.0, intercept=True)), True
    mean, scale = torch.tensor([1.0, -2.0]).double(), torch.tensor([0.5, 3.0]).double()
    made["standardised"] = cf.networks.StandardizedNetwork(made["attention l1"][0], mean, scale), True
    nothing = cf.Problem("attention", X, Y, beta=1.0)
    made["no heads"] = nothing.head.recover(Weights(torch.zeros(S, D, C).double()), nothing.layout), True
    return made


FEW = (  # one of each kind, for the quick tests; the slow ones take all
    "gated attention l2",
    "gated self_attention",
    "gated mlp_mixer per token",
    "gated fno on a grid",
    "block_fno per token",
    "gated poolformer",
    "fnet",
    "sum",
    "feature covariance sqrt",
    "feature queries",
    "gaussian kernel",
    "standardised",
)
NETWORKS = every_network()
each = pytest.mark.parametrize("name", NETWORKS)


def batch(n=5, seed=5):
    rng = np.random.default_rng(seed)
    mask = torch.from_numpy(rng.random((n, S)) > 0.3)
    mask[:, 0] = True
    return torch.from_numpy(rng.standard_normal((n, S, D))), mask


class Every(nn.Module):
    """All networks side by side: one trace for all of them."""

    def __init__(self, names):
        super().__init__()
        self.names = names
        self.networks = nn.ModuleList([NETWORKS[name][0] for name in names])

    def forward(self, X, mask):
        masks = [mask if NETWORKS[name][1] else None for name in self.names]
        return tuple(network(X, m) for network, m in zip(self.networks, masks, strict=True))


def agree(names, expected, found, tolerance):
    for name, a, b in zip(names, expected, found, strict=True):
        error = float((a.detach() - b.detach()).abs().max() / a.detach().abs().max().clamp_min(1e-3))
        assert error <= tolerance, f"{name}: {error:.1e}"


ANY_BATCH = ({0: torch.export.Dim("n")}, {0: torch.export.Dim("n")})


few_and_all = pytest.mark.parametrize("names", [FEW, pytest.param(tuple(NETWORKS), marks=pytest.mark.slow)], ids=len)


@few_and_all
def test_networks_are_exported_for_any_batch(names):
    every, (X, mask) = Every(names), batch()
    program = torch.export.export(every, (X, mask), dynamic_shapes=ANY_BATCH).module()
    for n in (5, 9):
        X, mask = batch(n, seed=n)
        agree(every.names, every(X, mask), program(X, mask), 1e-12)


@few_and_all
def test_networks_compile_without_a_graph_break(names):
    every, (X, mask) = Every(names), batch()
    # "eager" runs what was traced: fullgraph is what is tested, not a C++ compiler
    compiled = torch.compile(every, fullgraph=True, backend="eager")
    agree(every.names, every(X, mask), compiled(X, mask), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated attention l1", "gated self_attention", "gated fno", "feature covariance sqrt"])
def test_inductor_agrees(name):
    every, (X, mask) = Every((name,)), batch()
    agree(every.names, every(X, mask), torch.compile(every, fullgraph=True)(X, mask), 1e-10)


@each
def test_vmap_over_samples(name):
    network, masks = NETWORKS[name]
    X, mask = batch()
    args = (X, mask) if masks else (X,)
    found = torch.func.vmap(lambda *one: network(*(part[None] for part in one))[0])(*args)
    agree([name], [network(*args)], [found], 1e-12)


@pytest.mark.parametrize("name", ["gated attention l1", "mlp", "gated mlp_mixer", "gated fno", "standardised"])
def test_vmap_over_weights(name):
    network, _ = NETWORKS[name]
    X, _ = batch()
    weights = {key: torch.stack([value, 2 * value]).detach() for key, value in network.named_parameters()}
    found = torch.func.vmap(lambda own: torch.func.functional_call(network, own, (X,)))(weights)
    singles = [
        torch.func.functional_call(network, {key: value[k] for key, value in weights.items()}, (X,)) for k in (0, 1)
    ]
    agree([name], [torch.stack(singles)], [found], 1e-12)


@each
def test_a_batch_of_no_samples(name):
    network, masks = NETWORKS[name]
    X, mask = batch()
    expected = network(X, mask if masks else None).shape[1:]
    assert network(X[:0], mask[:0] if masks else None).shape == (0, *expected)


LAPACK = [name for name in NETWORKS if "covariance" in name or "kernel" in name]  # refuses NaN by itself


@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in [*LAPACK, "no heads"]])
def test_forward_computes_and_does_not_judge(name):
    network, _ = NETWORKS[name]
    X, _ = batch()
    X[0] = torch.nan
    outputs = network(X)
    assert not bool(torch.isfinite(outputs[0]).any())
    assert bool(torch.isfinite(outputs[1:]).all())


@each
def test_repr_shows_the_shapes(name):
    network, _ = NETWORKS[name]
    text = repr(network)
    for key, values in network._parameters.items():
        if values is not None:
            assert f"{key}={tuple(values.shape)}" in text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in ALL_HEADS])
def test_maps_and_kernels_take_half_types(name, dtype):
    network, masks = NETWORKS[name]
    X, mask = batch()
    exact = network(X.to(dtype).double(), mask if masks else None)
    assert network(X.to(dtype), mask if masks else None).dtype == torch.float64  # in its own dtype, whatever comes in
    found = copy.deepcopy(network).to(dtype)(X.to(dtype), mask if masks else None)
    assert found.dtype == dtype
    agree([name], [exact], [found.double()], 200 * torch.finfo(dtype).eps)


# ---------------------------------------------------------------------- files


def onnx_outputs(module, args, dtype):
    """What onnxruntime computes with the exported module, for these inputs and for twice as many samples."""
    import onnxruntime

    made = Every(module.names)
    made.networks = nn.ModuleList([_portable(network, dtype, "onnx") for network in module.networks])
    args = (args[0].to(dtype), args[1])
    with _quiet():
        program = torch.onnx.export(made, args, dynamo=True, verbose=False, dynamic_shapes=ANY_BATCH)
    buffer = io.BytesIO()
    program.save(buffer)
    session = onnxruntime.InferenceSession(buffer.getvalue(), providers=["CPUExecutionProvider"])

    def run(*inputs):
        slots = {slot.name: x.numpy() for slot, x in zip(session.get_inputs(), inputs, strict=True)}
        return [torch.from_numpy(values).double() for values in session.run(None, slots)]

    return run(*args), run(*(torch.cat([part, part]) for part in args))


def check_onnx(names, dtype, tolerance):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    module, (X, mask) = Every(names), batch()
    X = X.float().double()  # the tokens that the file sees: they decide the gates
    expected = module(X, mask)
    once, twice = onnx_outputs(module, (X, mask), dtype)
    agree(names, expected, once, tolerance)
    agree(names, [torch.cat([part, part]) for part in expected], twice, tolerance)


def test_onnx_agrees():
    check_onnx(FEW, torch.float32, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@each
def test_onnx_agrees_for_every_network(name, dtype):
    # the exporter stores scalar factors, such as a shrinkage, in float32 even where tensors are float64
    check_onnx((name,), dtype, 1e-5 if dtype == torch.float32 else 1e-7)


@pytest.mark.parametrize("kind", ["sqrt", "log"])
def test_roots_and_logarithms_without_eigenvectors(kind):
    X = torch.randn(20, 6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    X[0], X[1], X[2] = X[0, :1], X[1] * 1e-6, X[2] * 1e5  # no covariance at all, a tiny one, a large one
    for shrinkage in (1e-1, 1e-3, 1e-5):
        feature = F.CovariancePooling(kind, shrinkage).fit(X)
        expected = feature(X)
        feature.eigenvectors = False
        worst = (feature(X) - expected).abs().amax(1) / expected.abs().amax(1)
        assert float(worst.max()) < 1e-9


@pytest.mark.parametrize("format", ["onnx", "torch"])
def test_a_classifier_is_one_file_with_probabilities(tmp_path, format):
    if format == "onnx":
        pytest.importorskip("onnxruntime")
    rng = np.random.default_rng(3)
    X, y = rng.standard_normal((40, 3, 4)) + 5, np.array(["no", "yes"])[rng.integers(0, 2, 40)]
    mask = np.ones((40, 3), dtype=bool)
    mask[::4, 2] = False
    probe = cf.TokenClassifier(beta_ratio=0.05).fit(X, y, mask=mask)
    done = export(probe, tmp_path / "model", format)
    assert done.inputs == {"tokens": ("N", 3, 4), "mask": ("N", 3)}
    assert (done.outputs, done.classes) == (("outputs", "probabilities"), ("no", "yes"))
    assert done.difference < 1e-5
    tokens = np.where(mask[..., None], X, 0).astype(np.float32)
    if format == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(tmp_path / "model", providers=["CPUExecutionProvider"])
        assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == ["no", "yes"]
        outputs, probabilities = session.run(None, {"tokens": tokens, "mask": mask})
    else:
        program = torch.export.load(tmp_path / "model").module()
        outputs, probabilities = (part.numpy() for part in program(torch.from_numpy(tokens), torch.from_numpy(mask)))
    assert np.allclose(outputs, probe.decision_function(X, mask), atol=1e-4)
    assert np.allclose(probabilities, probe.predict_proba(X, mask), atol=1e-5)


def test_what_cannot_be_exported(tmp_path):
    network = NETWORKS["mlp"][0]
    with pytest.raises(ValueError, match="takes any number of tokens: say how many"):
        export(network, tmp_path / "m", "torch")
    assert export(network, tmp_path / "m", "torch", n_tokens=7).inputs == {"tokens": ("N", 7, 2)}
    with pytest.raises(ValueError, match="has weights for 4 tokens"):
        export(NETWORKS["attention l1"][0], tmp_path / "m", "torch", n_tokens=7)
    with pytest.raises(TypeError, match="cannot export a Linear"):
        export(nn.Linear(2, 2), tmp_path / "m")
    with pytest.raises(ValueError, match=r"unknown format 'onx'.*Did you mean 'onnx'"):
        export(network, tmp_path / "m", "onx")
