"""A session over an engine directory, on the executor that the engine was built for or on another that can run it."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvc_trt.errors import InputError
from kvc_trt.runtime import Session, load_tokenizer

if TYPE_CHECKING:
    from kvc_trt.engine import Engine
    from kvc_trt.progress import Progress

RUNNERS = {
    "onnxruntime": ("onnxruntime", "torch"),
    "torch": ("torch", "onnxruntime"),
    "tensorrt": ("tensorrt", "torch"),
    "tensorrt-llm": ("torch",),
}
"""Backend that an engine was built for -> backends that run it. A TensorRT engine's graphs may be of a type that ONNX
Runtime's CPU kernels do not have; its weights any backend in PyTorch reads."""

WAY_OUT = {
    "tensorrt-llm": "--backend torch: the same weights and kernels in PyTorch; or kvc-trt export tensorrt-llm, whose "
    "plans tensorrt_llm.runtime.Session and TensorRT load"
}
"""What to do with engines that no executor of ours loads. TensorRT 10.14, which builds them, cannot be asked which
outputs of a plan lie in the buffers of which inputs (get_aliased_input_tensor came with 10.15), and a cache that is
bound wrongly is read while it is written."""


def open_session(
    engine_dir: str | PathLike[str],
    *,
    backend: str | None = None,
    max_batch_size: int = 1,
    threads: int | None = None,
    progress: Progress | None = None,
    **executor_options: Any,
) -> Session:
    """A session over an engine directory, which is checked whole before anything is loaded.

    `backend` None is the one that the engine was built for; torch runs the weights of any engine in PyTorch around the
    kernels, and onnxruntime the graphs of those that keep theirs for it. `threads` None leaves the number to the
    executor (all cores). Further options go to the executor. Raises InputError for an engine that is not intact or
    cannot run there, UnsupportedEnvironment where this machine cannot run it.
    """
    from kvc_trt.engine import Engine

    engine = Engine.open(Path(engine_dir), progress=progress)
    return session_of(engine, backend=backend, max_batch_size=max_batch_size, threads=threads, **executor_options)


def session_of(
    engine: Engine,
    *,
    backend: str | None = None,
    max_batch_size: int = 1,
    threads: int | None = None,
    **executor_options: Any,
) -> Session:
    """A session over an engine that is open already; otherwise like `open_session`."""
    from kvc_trt.engine.supported import check_supported

    chosen = runner(engine.backend, backend)
    check_supported(engine.parameters, engine.model.num_hidden_layers, chosen)
    executor = executor_class(chosen)(engine, threads=threads, **executor_options)
    executor.load()
    return Session(
        executor,
        load_tokenizer(engine.tokenizer_path),
        max_batch_size,
        end_token_ids=engine.model.eos_token_ids,
    )


def runner(built_for: str, backend: str | None = None) -> str:
    """The backend that runs an engine: `backend`, or with None the one it was built for; InputError where it cannot."""
    chosen = backend or built_for
    runners = RUNNERS[built_for]
    if chosen not in runners:
        message = f"an engine built for {built_for} does not run on backend {chosen}; expected {' or '.join(runners)}"
        raise InputError(message, hint=WAY_OUT.get(built_for))
    return chosen


def executor_class(backend: str) -> Any:
    """The executor of a backend."""
    if backend == "onnxruntime":
        from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor

        return OnnxRuntimeExecutor
    if backend == "tensorrt":
        from kvc_trt.backends.tensorrt.executor import TensorRtExecutor

        return TensorRtExecutor
    from kvc_trt.backends.torch.executor import TorchExecutor

    return TorchExecutor
