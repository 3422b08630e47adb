"""A session over an engine directory, on the executor that the engine was built for."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvc_trt.runtime import Session, load_tokenizer

if TYPE_CHECKING:
    from kvc_trt.progress import Progress


def open_session(
    engine_dir: str | PathLike[str],
    *,
    max_batch_size: int = 1,
    threads: int | None = None,
    progress: Progress | None = None,
    **executor_options: Any,
) -> Session:
    """A session over an engine directory, which is checked whole before anything is loaded.

    `threads` None leaves the number to the executor (all cores). Further options go to the executor. Raises InputError
    for an engine that is not intact or was built for another backend.
    """
    from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
    from kvc_trt.engine import Engine

    engine = Engine.open(Path(engine_dir), progress=progress)
    executor = OnnxRuntimeExecutor(engine, threads=threads, **executor_options)
    executor.load()
    return Session(
        executor,
        load_tokenizer(engine.tokenizer_path),
        max_batch_size,
        end_token_ids=engine.model.eos_token_ids,
    )
