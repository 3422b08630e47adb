"""A session over an engine directory, on the executor that the engine was built for or on another that can run it."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvc_trt.errors import InputError
from kvc_trt.runtime import Session, load_tokenizer

if TYPE_CHECKING:
    from kvc_trt.progress import Progress


def open_session(
    engine_dir: str | PathLike[str],
    *,
    backend: str = "onnxruntime",
    max_batch_size: int = 1,
    threads: int | None = None,
    progress: Progress | None = None,
    **executor_options: Any,
) -> Session:
    """A session over an engine directory, which is checked whole before anything is loaded.

    `backend` torch runs the engine's weights in PyTorch around the kernels. `threads` None leaves the number to the
    executor (all cores). Further options go to the executor. Raises InputError for an engine that is not intact or was
    built for another backend.
    """
    from kvc_trt.engine import Engine

    engine = Engine.open(Path(engine_dir), progress=progress)
    executor = _executor_class(backend)(engine, threads=threads, **executor_options)
    executor.load()
    return Session(
        executor,
        load_tokenizer(engine.tokenizer_path),
        max_batch_size,
        end_token_ids=engine.model.eos_token_ids,
    )


def _executor_class(backend: str) -> Any:
    if backend == "onnxruntime":
        from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor

        return OnnxRuntimeExecutor
    if backend == "torch":
        from kvc_trt.backends.torch.executor import TorchExecutor

        return TorchExecutor
    raise InputError(f"backend {backend!r} cannot run an engine here; expected onnxruntime or torch")
