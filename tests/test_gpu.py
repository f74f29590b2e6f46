"""The same answers on a CUDA device; float32 there, certificates in float64."""

import pytest
import torch

import convexformer as cf

pytestmark = pytest.mark.gpu

HEADS = [
    cf.heads.Attention(),
    cf.heads.Attention(decay="l2"),
    cf.heads.Attention(activation="gated_relu", gates=4),
    cf.heads.MLP(activation="gated_relu", gates=8),
    cf.heads.Linear(),
    cf.heads.SelfAttention(),
    cf.heads.SelfAttention(activation="gated_relu", gates=2),
    cf.heads.MLPMixer(),
    cf.heads.MLPMixer(activation="gated_relu", gates=2),
    cf.heads.FNO(activation="gated_relu", gates=2, grid=(2, 2)),
    cf.heads.BlockFNO(blocks=2),
    cf.heads.Sum(["mlp", "fnet"]),
]


@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gpu_reaches_the_cpu_optimum(head, dtype):
    X, y = cf.data.digits(patch=4)
    cpu = cf.solve(cf.Problem(head, X, y, beta_ratio=0.1, intercept=True), tolerance=1e-5)
    problem = cf.Problem(head, X, y, beta_ratio=0.1, intercept=True, device="cuda", dtype=dtype)
    gpu = cf.solve(problem, tolerance=1e-4)
    assert gpu.dense().is_cuda
    assert gpu.certificate.kind == "exact"
    assert gpu.certificate.relative_gap <= 1e-4
    assert gpu.objective == pytest.approx(cpu.objective, rel=2e-4)
    network = gpu.network()
    assert torch.allclose(network(X.cuda()).double(), gpu.predict(X).double(), atol=1e-4)


def test_estimators_choose_the_gpu_and_survive_a_round_trip(tmp_path):
    X, y = cf.data.digits(patch=4)
    model = cf.TokenClassifier(device="auto").fit(X, y)
    assert model.solution_.dense().is_cuda
    back = cf.load(cf.save(model, tmp_path))
    assert (back.predict(X) == model.predict(X)).mean() > 0.999
