"""Answer prompts with an engine: rows, sampling, stopping, streaming, scheduling. An executor runs the graphs."""

from __future__ import annotations

from os import PathLike
from typing import Any

from kvc_trt.runtime.context import Context
from kvc_trt.runtime.request import Event, Output, Request, Sampling
from kvc_trt.runtime.scheduler.scheduler import Scheduler
from kvc_trt.runtime.scheduler.ticket import Ticket
from kvc_trt.runtime.session.session import Session
from kvc_trt.runtime.speculation.settings import Speculation
from kvc_trt.runtime.timings import Timings

__all__ = [
    "Context",
    "Event",
    "Output",
    "Request",
    "Sampling",
    "Scheduler",
    "Session",
    "Speculation",
    "Ticket",
    "Timings",
    "load_tokenizer",
]


def load_tokenizer(path: PathLike[str] | None) -> Any:
    """Return the `tokenizers.Tokenizer` of the tokenizer.json at `path`; None without a path.

    A prompt is encoded whole: what the file says of truncation and padding was meant for training.
    """
    if path is None:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
