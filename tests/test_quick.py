"""The quick test of an installed package: nothing but its own dependencies and pytest."""

import os
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

import numpy as np
import pytest
import torch

import convexformer as cf


def test_the_package_is_the_installed_one_and_complete():
    folder = Path(str(resources.files("convexformer")))
    assert (folder / "py.typed").exists()
    if os.environ.get("CONVEXFORMER_INSTALLED"):
        assert "site-packages" in folder.parts
    assert metadata.version("convexformer") == cf.__version__
    for name in cf.__all__:
        assert getattr(cf, name) is not None
    for module in (
        "certificates",
        "cli",
        "experiments.demo",
        "io",
        "objective",
        "registry",
        "rows",
        "testing",
        "weights",
    ):
        __import__(f"convexformer.{module}")


def test_fit_certify_save_load_predict(tmp_path):
    X, y = cf.data.digits(patch=4)
    probe = cf.TokenClassifier(beta_ratio=0.1).fit(X[:300], y[:300])
    assert probe.certificate_.meets(1e-3)
    assert probe.certificate_.kind == "exact"
    cf.save(probe, tmp_path)
    again = cf.load(tmp_path)
    assert again.certify(X[:300], y[:300]).meets(1e-3)
    assert (again.predict(X[300:400]) == probe.predict(X[300:400])).all()
    outputs = torch.from_numpy(probe.decision_function(X[:5]))
    assert torch.allclose(again.network_(X[:5]).detach(), outputs)


@pytest.mark.parametrize(
    "head", ["attention", "self_attention", "mlp_mixer", "fno", "poolformer", "fnet", "mlp", "linear"]
)
def test_every_head_is_certified(head):
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((40, 4, 3)), rng.standard_normal(40)
    solution = cf.solve(cf.Problem(head, X, y, beta_ratio=0.1))
    assert solution.certificate.meets(1e-4)


def test_the_command_line(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", X=rng.standard_normal((30, 3, 2)), y=np.arange(30) % 2)
    command = [sys.executable, "-m", "convexformer"]
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.strip() == cf.__version__
    subprocess.run([*command, "fit", tmp_path / "d.npz", "-o", tmp_path / "m"], check=True, capture_output=True)
    assert (tmp_path / "m" / "config.json").exists()
