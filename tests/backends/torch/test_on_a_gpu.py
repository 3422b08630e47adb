"""The torch backend on a GPU. It imports only packages that benchmarks/bundle brings to a machine with one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvc_trt.backends.torch.executor import TorchExecutor
from kvc_trt.engine.missing import missing_kernel
from kvc_trt.kernels import use_library
from kvc_trt.kernels.stored_parts import StoredTables
from kvc_trt.models.cache_formats import AUTO, CACHE_FORMATS
from kvc_trt.runtime.session.batch import batch_of
from kvc_trt.verify.engine_run import run
from tests.backends.prompts import filled
from tests.every_policy import CASES
from tests.small_model import SMALL

STEPS = 4


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache", ["auto", "int4"])
@pytest.mark.parametrize("policy", ["full", "rocketkv"])
def test_a_replayed_graph_is_the_eager_step(policy, kv_cache, make_program, gpu):
    """Covers several steps and two numbers of rows, one served by a larger graph; a watched step is never captured."""
    program = make_program(policy, "bf16", model=replace(SMALL, dtype="bfloat16"), kv_cache=kv_cache)
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
@pytest.mark.parametrize("form", [name for name in CACHE_FORMATS if name != AUTO])
def test_a_gpu_stores_the_codes_of_its_own_keys_and_values(form, make_program, gpu):
    """Kernels store a prompt and a step; the reference makes the same bits of what was stored."""
    program = make_program("full", "bf16", model=replace(SMALL, dtype="bfloat16"), kv_cache=form)
    with use_library(gpu.library.path):
        executor = TorchExecutor(program, device=gpu.device, expose=["keys.0", "values.0", "key.0", "value.0"])
        executor.allocate(3)
        executor.decode(*filled(executor))
    shown = [executor.decoder.exposed[name].cpu() for name in ("keys.0", "values.0", "key.0", "value.0")]
    keys, values, key, value = (table[0] for table in shown)
    exact = (torch.cat([table[:, :200], new[:, None]], dim=1) for table, new in ((keys, key), (values, value)))
    cache_format = program.parameters.cache_format
    held = StoredTables.named(executor.state, cache_format, suffix=".0").map(lambda part: part[0, :, :201].cpu())
    for found, expected in zip(held.parts, StoredTables.of(*exact, cache_format).parts, strict=True):
        assert torch.equal(found, expected)


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
