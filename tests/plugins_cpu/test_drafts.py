"""A draft graph with native operators: a pass is its tokens' steps, and no step waits for what is one node."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvc_trt.backends.onnxruntime import native
from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.engine.program import read_graph
from kvc_trt.graph.rewrites.native import prepare, prepare_draft
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.native import NATIVE_NARROW_LINEAR
from tests.backends.onnxruntime.test_drafts import DRAFT_TOKENS, Rows, programs
from tests.plugins_cpu.libraries import BEST, LOWEST

__all__ = ["programs"]


@pytest.fixture
def native_library(library: Path, monkeypatch) -> Path:
    monkeypatch.setenv(native.VARIABLE, str(library))
    return library


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "rocketkv", "rocketkv, bounds in fp8", "sparq"])
@pytest.mark.parametrize(
    ("kept", "instructions"),
    [*((kept, BEST) for kept in (1, 3, 1 + DRAFT_TOKENS)), *((1 + DRAFT_TOKENS, name) for name in LOWEST)],
    indirect=["instructions"],
)
def test_a_rejection_leaves_what_steps_leave(native_library, instructions, programs, policy, kept):
    rows = Rows(programs(policy), [200, 31])
    for number in range(3):
        rows.check([kept] * 2, seed=number)


def test_products_are_native_and_steps_do_not_wait(library: Path, programs):
    program = programs("rocketkv")
    operators = native.load(library).operators
    written = prepare(read_graph(program.draft), operators)
    loaded = prepare_draft(written, operators)
    kinds = [node.op_type for node in loaded.graph.node]
    assert kinds.count("Gemm") == 0
    assert kinds.count(NATIVE_NARROW_LINEAR) == [node.op_type for node in written.graph.node].count("Gemm")
    assert kinds.count("Expand") == 0
    assert {node.op_type for node in written.graph.node} >= {"Expand", "Shape"}
    steps = [node for node in loaded.graph.node if node.domain == KVC_DOMAIN and "Attention" in node.op_type]
    assert len(steps) == (1 + DRAFT_TOKENS) * program.model.num_hidden_layers


def test_steps_that_the_library_lacks_run_bodies_and_wait(library: Path, programs):
    operators = native.load(library).operators - {"KvcHybridAttention_fp8_bounds"}
    written = prepare(read_graph(programs("rocketkv, bounds in fp8").draft), operators)
    kinds = [[node.op_type for node in model.graph.node] for model in (written, prepare_draft(written, operators))]
    assert kinds[0].count("Expand") == kinds[1].count("Expand") > 0


def test_a_draft_graph_without_native_operators_is_unchanged(programs):
    program = programs("rocketkv")
    written = prepare(read_graph(program.draft), ())
    assert prepare_draft(written, ()) == written


def test_native_products_need_no_packed_copy(native_library, programs):
    executor = OnnxRuntimeExecutor(programs("full"), RunOptions(threads=1))
    options = executor.draft_session.get_session_options()
    assert options.get_session_config_entry("session.disable_prepacking") == "1"
