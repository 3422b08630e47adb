"""The rule of packed weights, and that sessions and `plan` follow the same one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvc_trt.backends.onnxruntime.native import NativeOperators
from kvc_trt.backends.onnxruntime.packed_copies import PREPACK_UP_TO_BYTES, passes_pack, steps_pack
from kvc_trt.backends.registry import backend
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.operators.native import NATIVE_NARROW_LINEAR
from kvc_trt.operators.quantised_linear import QUANTISED_LINEAR

BODIES = None
NATIVE = NativeOperators(Path("library"), frozenset({QUANTISED_LINEAR.name, NATIVE_NARROW_LINEAR}))
OLDER = NativeOperators(Path("library"), frozenset({QUANTISED_LINEAR.name}))
SMALL, LARGE = PREPACK_UP_TO_BYTES, PREPACK_UP_TO_BYTES + 1


@pytest.mark.parametrize(
    ("size", "quantised", "native", "steps", "passes"),
    [
        (SMALL, False, BODIES, True, True),
        (SMALL, False, OLDER, True, True),
        (SMALL, False, NATIVE, True, False),
        (LARGE, False, BODIES, False, False),
        (LARGE, True, BODIES, True, True),
        (SMALL, True, NATIVE, False, False),
    ],
)
def test_steps_and_passes_pack_their_weights(size, quantised, native, steps, passes):
    assert steps_pack(size, quantised=quantised, native=native) == steps
    assert passes_pack(steps, quantised=quantised, native=native) == passes


@pytest.mark.parametrize(
    ("name", "weights", "drafts", "copies"),
    [
        ("onnxruntime", "fp32", False, ("steps",)),
        ("onnxruntime", "fp32", True, ("steps", "passes over drafts")),
        ("onnxruntime", "int8", True, ("steps", "passes over drafts")),
        ("openvino", "fp32", True, ("prompts", "steps", "passes over drafts")),
        ("tensorrt", "fp16", False, None),
    ],
)
def test_each_backend_names_the_graphs_with_packed_weights(name, weights, drafts, copies, monkeypatch):
    monkeypatch.setenv("KVC_TRT_CPU_KERNELS", "none")
    assert backend(name).packed_copies(weights, SMALL, drafts=drafts) == copies


def test_sessions_of_steps_and_drafts_pack_and_prefill_does_not(make_program, monkeypatch):
    from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor

    monkeypatch.setenv("KVC_TRT_CPU_KERNELS", "none")
    executor = OnnxRuntimeExecutor(make_program("full", draft_tokens=4), RunOptions(threads=1))
    assert packs(executor.decode_session)
    assert packs(executor.draft_session)
    assert not packs(executor.prefill_session)


def packs(session) -> bool:
    try:
        return session.get_session_options().get_session_config_entry("session.disable_prepacking") != "1"
    except RuntimeError:  # there is no such entry
        return True
