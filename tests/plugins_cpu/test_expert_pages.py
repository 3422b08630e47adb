"""With native operators, experts that no token has chosen stay out of memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.experts.pages import resident_bytes, shares
from kvc_trt.backends.onnxruntime import native
from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.models.config import ClampedGate, Experts, ModelConfig, ModelDescription
from tests.small_model import SMALL
from tests.small_programs import SmallPrograms, copied

EXPERTS = Experts(64, 1, 128)
DESCRIPTIONS = {
    "MixtralForCausalLM": ModelDescription(experts=EXPERTS),
    "GptOssForCausalLM": ModelDescription(experts=EXPERTS, clamped_gate=ClampedGate(7.0, 1.702)),
}
MODELS = [
    replace(SMALL, architecture=name, hidden_size=256, intermediate_size=EXPERTS.size, description=description)
    for name, description in DESCRIPTIONS.items()
]
NEIGHBOURS = {"MixtralForCausalLM": 2 << 20, "GptOssForCausalLM": 3 << 20}
"""Bytes at most that the system maps beside those that are read: some around each place, and biases are places too."""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc/self/smaps, which Linux has")
@pytest.mark.parametrize("model", MODELS, ids=DESCRIPTIONS)
@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_neither_loading_nor_a_step_reads_experts_that_are_not_chosen(
    library: Path,
    make_program: SmallPrograms,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    precision: str,
    model: ModelConfig,
) -> None:
    """Uses a file of its own: executors left by other tests may still map the shared one."""
    monkeypatch.setenv(native.VARIABLE, str(library))
    program = copied(make_program("full", precision, model=model), tmp_path)
    path = program.weight_file.path
    mapped, size = f"{path.parent.name}/{path.name}", path.stat().st_size
    neighbours = NEIGHBOURS[model.architecture]
    every, of_a_token = shares(model, EXPERTS, size)
    executor = OnnxRuntimeExecutor(program, RunOptions(threads=1))
    executor.load()
    loaded = resident_bytes(mapped)
    assert loaded <= size - every + neighbours < every
    executor.allocate(1)
    executor.insert(executor.prefill(np.full((1, 3), 5), np.array([3])), 0, 0)
    executor.decode(np.array([6]), np.array([3]), np.full((model.num_hidden_layers, 1), 3))
    assert of_a_token <= resident_bytes(mapped) <= size - every + 4 * of_a_token + neighbours < every
