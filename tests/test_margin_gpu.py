"""Attention SVMs and flows on a CUDA device."""

import numpy as np
import pytest
import torch

import convexformer as cf

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("norm", ["nuclear", "frobenius", "diagonal"])
def test_gpu_svm_equals_the_cpu_svm(norm):
    data = cf.margin.sample_data("diagonal")
    cpu = cf.margin.AttentionSVM(norm).fit(*data)
    gpu = cf.margin.AttentionSVM(norm, device="cuda").fit(*data)
    assert gpu.certificate_.meets(1e-6)
    assert gpu.objective_ == pytest.approx(cpu.objective_, rel=2e-6)
    there = cf.margin.AttentionSVM(norm).fit(*(torch.from_numpy(part).cuda() for part in data))
    assert there.objective_ == pytest.approx(cpu.objective_, rel=2e-6)


def test_gpu_svm_of_real_size():
    rng = np.random.default_rng(0)
    data = rng.standard_normal((200, 20, 100)), rng.standard_normal((200, 100)), np.ones(200), rng.standard_normal(100)
    svm = cf.margin.AttentionSVM(tolerance=1e-4, device="cuda").fit(*data)
    assert svm.certificate_.meets(1e-4)


@pytest.mark.parametrize("parametrization", ["separate", "combined", "diagonal"])
def test_gpu_flow_ends_where_the_cpu_flow_ends(parametrization):
    data = cf.margin.sample_data("diagonal")
    norm = {"separate": "nuclear", "combined": "frobenius", "diagonal": "diagonal"}[parametrization]
    svm = cf.margin.AttentionSVM(norm).fit(*data)
    options = {"parametrization": parametrization, "log_time": 1e3, "records": 5}
    cpu = cf.margin.gradient_flow(*data, **options)
    gpu = cf.margin.gradient_flow(*data, device="cuda", **options)
    assert gpu.suboptimality(svm) == pytest.approx(cpu.suboptimality(svm), abs=2e-3)
    assert gpu.log_time[-1] >= 1e3


def test_gpu_flow_of_many_starts_at_once():
    data = cf.margin.sample_data("general")
    svm = cf.margin.AttentionSVM().fit(*data)
    flow = cf.margin.gradient_flow(*data, device="cuda", n_init=256, log_time=1e4, records=4)
    assert flow.W.shape[1] == 256
    assert (flow.suboptimality(svm) <= 0.01).all()
