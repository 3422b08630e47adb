"""Prefill in bfloat16 by native operators: its effects, and the cases where it is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvc_trt.backends.base import Backend
from kvc_trt.backends.onnxruntime import native
from kvc_trt.backends.onnxruntime.backend import OnnxRuntimeBackend
from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.backends.torch.backend import TorchBackend
from kvc_trt.errors import InputError, UnsupportedEnvironment


@pytest.fixture
def bf16_library(library: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(native.VARIABLE, str(library))
    if native.load(library).instructions != native.BF16:
        pytest.skip("this processor multiplies no bfloat16")
    return library


def prefilled(program, precision: str, length: int = 200):
    executor = OnnxRuntimeExecutor(program, RunOptions(threads=1, prefill_precision=precision))
    ids = np.random.default_rng(0).integers(1, program.model.vocab_size, (1, 256))
    return executor, executor.prefill(ids, np.array([length]))


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_results_are_near_those_of_f32_and_not_the_same(bf16_library: Path, make_program, precision: str) -> None:
    program = make_program("full", precision)
    (_, plain), (_, rounded) = (prefilled(program, name) for name in ("f32", "bf16"))
    largest = np.abs(plain.logits).max()
    assert 0 < np.abs(plain.logits - rounded.logits).max() < 0.16 * largest
    for name, state in plain.state.items():
        assert np.abs(state - rounded.state[name]).max() < 0.16 * max(1, np.abs(state).max())


def test_decode_is_the_same_graph(bf16_library: Path, make_program) -> None:
    program = make_program("full")
    executors = [prefilled(program, name)[0] for name in ("f32", "bf16")]
    logits = []
    for executor in executors:
        executor.allocate(1)
        logits.append(
            executor.decode(np.array([5]), np.array([0]), np.zeros((len(executor.limits.capacities), 1), int))
        )
    np.testing.assert_array_equal(*logits)


def test_bodies_have_no_bf16(monkeypatch: pytest.MonkeyPatch, make_program) -> None:
    monkeypatch.setenv(native.VARIABLE, native.NONE)
    with pytest.raises(UnsupportedEnvironment, match="found the operators' bodies") as raised:
        OnnxRuntimeExecutor(make_program("full"), RunOptions(prefill_precision="bf16"))
    assert raised.value.hint == "--prefill-precision f32, or --backend openvino"


def test_other_instruction_sets_have_no_bf16(bf16_library: Path, make_program) -> None:
    loaded = native.load(bf16_library)
    loaded.use_instructions("avx2")
    try:
        with pytest.raises(UnsupportedEnvironment, match=r"expected native operators \(avx512bf16\), found .*avx2"):
            OnnxRuntimeExecutor(make_program("full"), RunOptions(prefill_precision="bf16"))
    finally:
        loaded.use_instructions(native.BF16)


def test_float16_caches_have_no_bf16(bf16_library: Path, make_program) -> None:
    with pytest.raises(UnsupportedEnvironment, match="bodies"):
        OnnxRuntimeExecutor(make_program("full", "fp16"), RunOptions(prefill_precision="bf16"))


@pytest.mark.parametrize(
    ("backend", "precision"), [(OnnxRuntimeBackend(), "f64"), (TorchBackend(), "bf16"), (OnnxRuntimeBackend(), "f16")]
)
def test_a_precision_that_a_backend_lacks_is_refused(backend: Backend, precision: str) -> None:
    with pytest.raises(InputError, match=f"prefill precision '{precision}' on {backend.name}; expected f32"):
        backend.check_options(RunOptions(prefill_precision=precision))
