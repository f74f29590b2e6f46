"""Kernels, block norms and the portfolio on a CUDA device, against a CPU."""

import numpy as np
import pytest
import torch

import convexformer as cf

pytestmark = pytest.mark.gpu
F, H = cf.features, cf.heads

HEADS = {
    "feature": H.Feature(F.CovariancePooling()),
    "block norm": H.Feature(F.SoftmaxQueries(8), decay="frobenius"),
    "kernel ridge": H.Kernel(F.Flatten()),
    "gaussian norm": H.Kernel(F.CovariancePooling(), kernel="gaussian", decay="frobenius"),
    "portfolio": H.portfolio(),
}


@pytest.fixture(scope="module")
def digits():
    X, y = cf.data.digits(patch=2)
    return X[:500], y[:500]


@pytest.mark.parametrize("name", HEADS)
def test_gpu_reaches_the_cpu_optimum(name, digits):
    X, y = digits
    cpu = cf.solve(cf.Problem(HEADS[name], X, y, beta_ratio=0.02, intercept=True), tolerance=1e-5)
    gpu = cf.solve(cf.Problem(HEADS[name], X, y, beta_ratio=0.02, intercept=True, device="cuda"), tolerance=1e-3)
    assert gpu.weights.form.device.type == "cuda"
    assert gpu.certificate.meets(1e-3)
    # float32 features are other data, by their rounding; k-means may settle elsewhere
    assert gpu.objective == pytest.approx(cpu.objective, rel=1e-2)
    outputs = gpu.network()(X.float().cuda()).detach()
    assert torch.allclose(outputs.double(), gpu.predict(X).double(), atol=1e-3 * float(outputs.abs().max()))


def test_the_portfolio_searches_on_a_gpu_and_repeats_itself(digits, tmp_path):
    X, y = digits
    cpu = cf.TokenClassifierCV(head="auto", cv=3, device="cpu").fit(X, y)
    gpu = cf.TokenClassifierCV(head="auto", cv=3, device="cuda").fit(X, y)
    assert gpu.certificate_.meets(1e-3)
    assert gpu.best_score_ == pytest.approx(cpu.best_score_, abs=0.01)
    again = cf.TokenClassifierCV(head="auto", cv=3, device="cuda").fit(X, y)
    np.testing.assert_allclose(again.predict_proba(X), gpu.predict_proba(X), atol=1e-4)
    back = cf.load(cf.save(gpu, tmp_path))
    assert (back.predict(X) == gpu.predict(X)).mean() > 0.99


def test_strict_folds_on_a_gpu(digits):
    X, y = digits
    found = cf.TokenClassifierCV(head="auto", cv=2, device="cuda", validation="folds").fit(X[:200], y[:200])
    assert found.certificate_.meets(1e-3)
