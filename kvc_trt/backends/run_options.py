"""The options of a run: one object from `Engine.open` and the command line down to the executors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from kvc_trt.runtime import Speculation

PrefillPrecision = Literal["f32", "bf16"]
"""The arithmetic of prefill; decode, its caches and the stored engine are the same in both. f32 keeps the same tokens
of a prompt as the reference. bf16 rounds the factors of attention and of float matrices to 8 bits, sums in float32, and
is judged by verify's bars of bfloat16."""
PREFILL_PRECISIONS: tuple[PrefillPrecision, ...] = get_args(PrefillPrecision)


@dataclass(frozen=True)
class RunOptions:
    """The options for running an engine. Functions between the caller and the user of one pass on the whole object."""

    backend: str | None = None
    """The backend that runs the engine; None is the one that it was built for."""
    threads: int | None = None
    """The number of CPU threads; None leaves it to the executor, which takes all cores."""
    prefill_precision: PrefillPrecision = "f32"
    """The arithmetic of prefill; bf16 is faster on a processor that multiplies bfloat16, and some backends lack it."""
    prefix_bytes: int = 0
    """The memory in bytes for the contexts of texts that prompts have in common."""
    speculation: Speculation | None = None
    """The settings of drafts; None makes no drafts."""
    warm_up: bool = False
    """Compile and capture steps of every number of rows when the engine is opened, not when a request needs them."""
    proofs: bool = False
    """True if requests may ask for a KV proof: the graphs then output the tokens that the caches keep and read."""


DEFAULTS = RunOptions()
