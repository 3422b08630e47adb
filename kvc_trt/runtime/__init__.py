"""Answer prompts with an engine: rows, sampling, stopping, streaming, scheduling. An executor runs the graphs."""

from typing import TYPE_CHECKING

from kvc_trt.lazy import lazy_names

if TYPE_CHECKING:
    from kvc_trt.models.sources.tokenizer import load_tokenizer
    from kvc_trt.runtime.context import Context
    from kvc_trt.runtime.grammar.grammar import Grammar
    from kvc_trt.runtime.request import Event, Output, Request, Sampling
    from kvc_trt.runtime.scheduler.scheduler import Scheduler
    from kvc_trt.runtime.scheduler.ticket import Ticket
    from kvc_trt.runtime.session.session import Session
    from kvc_trt.runtime.speculation.settings import Speculation
    from kvc_trt.runtime.timings import Timings
else:
    _MODULES = {
        "load_tokenizer": "kvc_trt.models.sources.tokenizer",
        "Context": "kvc_trt.runtime.context",
        "Grammar": "kvc_trt.runtime.grammar.grammar",
        **dict.fromkeys(("Event", "Output", "Request", "Sampling"), "kvc_trt.runtime.request"),
        "Scheduler": "kvc_trt.runtime.scheduler.scheduler",
        "Ticket": "kvc_trt.runtime.scheduler.ticket",
        "Session": "kvc_trt.runtime.session.session",
        "Speculation": "kvc_trt.runtime.speculation.settings",
        "Timings": "kvc_trt.runtime.timings",
    }
    __getattr__ = lazy_names(__name__, _MODULES)

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
