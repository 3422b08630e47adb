"""Answer prompts with an engine: rows, sampling, stopping, streaming, scheduling. An executor runs the graphs."""

from __future__ import annotations

from kvc_trt.files.held import HeldFile
from kvc_trt.models.sources.tokenizer import held_tokenizer
from kvc_trt.models.sources.tokenizer_library import Tokenizer
from kvc_trt.runtime.context import Context
from kvc_trt.runtime.grammar.grammar import Grammar
from kvc_trt.runtime.request import Event, Output, Request, Sampling
from kvc_trt.runtime.scheduler.scheduler import Scheduler
from kvc_trt.runtime.scheduler.ticket import Ticket
from kvc_trt.runtime.session.session import Session
from kvc_trt.runtime.speculation.settings import Speculation
from kvc_trt.runtime.timings import Timings

__all__ = [
    "Context",
    "Event",
    "Grammar",
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


def load_tokenizer(file: HeldFile | None) -> Tokenizer | None:
    """Return the tokenizer in a tokenizer.json; None without a file."""
    return None if file is None else held_tokenizer(file)
