"""Answering prompts with an engine: rows, sampling, stopping, streaming; the executor runs the graphs."""

from __future__ import annotations

from os import PathLike
from typing import Any

from kvc_trt.runtime.request import Event, Output, Request, Sampling
from kvc_trt.runtime.session import Session, Timings

__all__ = ["Event", "Output", "Request", "Sampling", "Session", "Timings", "open_session"]


def open_session(
    engine_dir: str | PathLike[str], *, max_batch_size: int = 1, threads: int | None = None, **executor_options: Any
) -> Session:
    """A session over an engine directory, which is checked whole before anything is loaded.

    `threads` None leaves the number to the executor (all cores). Raises InputError for an engine that is not intact.
    """
    from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
    from kvc_trt.engine import Engine

    engine = Engine.open(engine_dir)
    executor = OnnxRuntimeExecutor(engine, threads=threads, **executor_options)
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
