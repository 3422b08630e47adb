"""The torch backend on a GPU. It imports only packages that benchmarks/bundle brings to a machine with one."""

from __future__ import annotations

import numpy as np
import pytest

from kvc_trt.backends.torch.executor import TorchExecutor
from kvc_trt.engine.missing import missing_kernel
from kvc_trt.kernels import use_library
from kvc_trt.runtime.session.batch import batch_of
from kvc_trt.verify.engine_run import run
from tests.backends.prompts import filled
from tests.every_policy import CASES

STEPS = 4


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["full", "rocketkv"])
def test_a_replayed_graph_is_the_eager_step(policy, make_program, gpu):
    """Covers several steps and two numbers of rows, one served by a larger graph; a watched step is never captured."""
    program = make_program(policy, "bf16")
    with use_library(gpu.library.path):
        captured = TorchExecutor(program, device=gpu.device)
        eager = TorchExecutor(program, device=gpu.device, expose=["query.2"])
        captured.capturer = gpu.capturer()
        for executor in (captured, eager):
            executor.allocate(4)
        step, _ = [filled(executor) for executor in (captured, eager)]
        for offset in range(3):
            for rows in (3, 2):
                fed = step[0][:rows], step[1][:rows] + offset, np.ascontiguousarray(step[2][:, :rows] + offset)
                found, expected = captured.decode(*fed), eager.decode(*fed)
                assert np.abs(found - expected).max() <= 2e-2 * np.abs(expected).max()
    assert captured.capturer.captures
    assert not eager.capturer.captures


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_gives_what_the_cpu_gives(name, make_program, gpu):
    made = make_program(name, "fp16", turns=True, max_output_len=40)
    if missing_kernel(made.parameters, made.model.num_hidden_layers) is not None:
        pytest.importorskip("onnx", reason="operators without a kernel run by the nodes of their ONNX bodies")
    batch = batch_of([np.random.default_rng(1).integers(2, 97, n).tolist() for n in (250, 40)])
    on_cpu = run(TorchExecutor(made, device="cpu"), batch, 0)
    with use_library(gpu.library.path):
        found = run(TorchExecutor(made, device=gpu.device), batch, STEPS)
    assert np.abs(found.logits[0] - on_cpu.logits[0]).max() <= 2e-2 * max(1.0, np.abs(on_cpu.logits).max())
    assert np.isfinite(found.logits).all()
