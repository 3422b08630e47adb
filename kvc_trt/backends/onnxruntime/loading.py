"""Open the graphs of an engine as ONNX Runtime sessions, and run them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvc_trt.backends.onnxruntime.native import NativeOperators, native_operators
from kvc_trt.backends.run_options import PrefillPrecision
from kvc_trt.engine.program import Graph, read_graph
from kvc_trt.errors import KvcError, UnsupportedEnvironment
from kvc_trt.files.held import HeldFile

if TYPE_CHECKING:
    from onnx import ModelProto
    from onnxruntime import InferenceSession, IOBinding, RunOptions, SessionOptions

    from kvc_trt.backends.onnxruntime.shared_weights import SharedWeights

NO_ERRORS = 4  # they are raised; the log would say them once more
WAIT_POLICY = "OMP_WAIT_POLICY"
"""The environment variable in which OpenMP is told that threads sleep while they wait: "passive"."""
_OUT_OF_MEMORY = "Failed to allocate memory"  # how ONNX Runtime's arena says it


@dataclass(frozen=True)
class LoadOptions:
    """Options for loading one graph."""

    threads: int | None
    """The number of threads; None for ONNX Runtime's default, all cores."""
    prepack: bool
    """True to copy weights into the kernels' preferred layout; otherwise they stay mapped from the file."""
    profile_prefix: Path | None = None
    """The prefix of the file for ONNX Runtime's profile; None writes none."""
    dtype: str = "float32"
    """The type of the caches; native operators support only some types."""
    prefill: PrefillPrecision | None = None
    """The arithmetic of a prefill graph; None for any other graph. bf16 needs native operators that have it."""
    weights: SharedWeights | None = None
    """The file of the graph's weights; None for a graph that holds its own."""
    prepared: bool = False
    """True if the graph is a part of one returned by `prepared_graph`."""
    shares_buffers: bool = False
    """True to share one arena of buffers among such sessions, which must run one after another."""
    few_tokens: bool = False
    """True for a draft graph, whose products of few tokens run natively if the library has such a product."""
    by_bodies: bool = False
    """True to run the operators' bodies even if there are native operators."""

    @property
    def native(self) -> NativeOperators | None:
        """The library of native operators; None if the operators' bodies run."""
        return None if self.by_bodies else native_operators(self.dtype)


def load_graph(graph: Graph, options: LoadOptions, expose: Sequence[str] = ()) -> InferenceSession:
    """Return an inference session of one graph, from a file or built in memory.

    `expose` names internal values that become outputs of an in-memory copy. ONNX Runtime opens no file itself.
    Raises UnsupportedEnvironment if this ONNX Runtime cannot load the graph.
    """
    import onnxruntime

    session_options = _session_options(options)
    native = options.native
    try:
        if native is not None:
            native.register(session_options)
        model = read_graph(graph) if options.prepared else _prepared(graph, expose, native, options)
        if options.weights is not None:
            options.weights.lend(model, session_options)
        return onnxruntime.InferenceSession(
            bytes(model.SerializeToString()), session_options, providers=["CPUExecutionProvider"]
        )
    except (MemoryError, KvcError):
        raise
    except Exception as error:  # onnxruntime's exceptions have no other common base
        what = graph.path if isinstance(graph, HeldFile) else "a graph"
        raise UnsupportedEnvironment(
            f"onnxruntime {onnxruntime.__version__} cannot load {what}: {str(error).splitlines()[0]}",
            hint="kvc-trt doctor",
        ) from error


def prepared_graph(graph: Graph, options: LoadOptions, expose: Sequence[str] = ()) -> ModelProto:
    """Return a graph in the form in which `load_graph` passes it to ONNX Runtime."""
    return _prepared(graph, expose, options.native, options)


def run_bound(session: InferenceSession, binding: IOBinding, options: RunOptions | None = None) -> None:
    """Run a session on its binding; UnsupportedEnvironment if the machine has too little memory."""
    try:
        session.run_with_iobinding(binding, options)
    except Exception as error:  # as above
        if _OUT_OF_MEMORY not in str(error):
            raise
        raise UnsupportedEnvironment(
            "this machine has too little memory for the run",
            hint="take a shorter prompt or a smaller batch",
        ) from error


def _session_options(options: LoadOptions) -> SessionOptions:
    import onnxruntime

    session_options = onnxruntime.SessionOptions()
    session_options.intra_op_num_threads = options.threads or 0
    session_options.log_severity_level = NO_ERRORS
    # Keep the graph's order. By default nodes without consumers, compaction among them, run last, and the full
    # caches of all layers are alive until then.
    session_options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    if not options.prepack:
        session_options.add_session_config_entry("session.disable_prepacking", "1")
    end_waiting_with_the_run(session_options)
    if options.shares_buffers:
        _make_shared_arena()
        session_options.add_session_config_entry("session.use_env_allocators", "1")
    if options.profile_prefix is not None:
        session_options.enable_profiling = True
        session_options.profile_file_prefix = str(options.profile_prefix)
    return session_options


def end_waiting_with_the_run(options: SessionOptions) -> None:
    """Let threads wait actively within a run only, and not at all where OMP_WAIT_POLICY is "passive".

    Otherwise they do so for some 20 ms after it, on the processors that the next session needs: a slice of a prefill
    after each step, and a step after each slice.
    """
    options.add_session_config_entry("session.force_spinning_stop", "1")
    passive = os.environ.get(WAIT_POLICY, "").lower() == "passive"
    options.add_session_config_entry("session.intra_op.allow_spinning", "0" if passive else "1")


@cache
def _make_shared_arena() -> None:
    """Register the arena of the process; sessions use their own unless their options say otherwise."""
    import onnxruntime

    memory = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    onnxruntime.create_and_register_allocator(memory, None)


def _prepared(graph: Graph, expose: Sequence[str], native: NativeOperators | None, options: LoadOptions) -> ModelProto:
    from kvc_trt.graph.rewrites.expose import expose as exposed
    from kvc_trt.graph.rewrites.native import prepare, prepare_draft, prepare_prefill

    model = read_graph(graph)
    whole = exposed(model, expose) if expose else model
    operators = frozenset[str]() if native is None else native.operators
    prepared = prepare(whole, operators)
    if options.few_tokens:
        return prepare_draft(prepared, operators)
    return prepared if options.prefill is None else prepare_prefill(prepared, operators, bf16=options.prefill == "bf16")
