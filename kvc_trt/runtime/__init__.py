"""Answering prompts with an engine: rows, sampling, stopping, streaming; the executor runs the graphs."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvc_trt.runtime.request import Event, Output, Request, Sampling
from kvc_trt.runtime.session import Session, Timings

if TYPE_CHECKING:
    from kvc_trt.progress import Progress

__all__ = ["Event", "Output", "Request", "Sampling", "Session", "Timings", "load_tokenizer", "open_session"]


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


def load_tokenizer(path: PathLike[str] | None) -> Any:
    """The `tokenizers.Tokenizer` of a tokenizer.json; None where the engine has none."""
    if path is None:
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))
