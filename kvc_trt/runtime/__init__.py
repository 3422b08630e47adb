"""Answering prompts with an engine: rows, sampling, stopping, streaming; the executor runs the graphs."""

from __future__ import annotations

from os import PathLike
from typing import Any

from kvc_trt.runtime.request import Event, Output, Request, Sampling
from kvc_trt.runtime.session import Session, Timings

__all__ = ["Event", "Output", "Request", "Sampling", "Session", "Timings", "load_tokenizer"]


def load_tokenizer(path: PathLike[str] | None) -> Any:
    """The `tokenizers.Tokenizer` of a tokenizer.json; None where the engine has none."""
    if path is None:
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))
