"""The tasks by name: one line each."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from kvc_trt.errors import InputError
from kvc_trt.verify.tasks.sample import Generate
from kvc_trt.verify.tasks.scoring import Score

Reads = Literal["text", "ids"]


@dataclass(frozen=True)
class Task:
    """A generator and how its answers are scored.

    `max_new_tokens` is what the originals generate; a model that ends its answers sooner needs less. A task that reads
    `ids` is written as decimal token ids between spaces, needs no tokenizer, and takes the option `vocabulary_size`.
    """

    name: str
    family: str
    summary: str
    max_new_tokens: int
    generate: Generate
    score: Score
    reads: Reads = "text"


TASKS: dict[str, Task] = {}


def task(name: str) -> Task:
    """The task of that name; InputError names the nearest one."""
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        raise InputError(
            f"unknown task {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""), hint="kvc-trt tasks lists them"
        )
    return TASKS[name]
