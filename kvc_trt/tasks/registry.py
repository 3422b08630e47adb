"""The tasks by name: one entry each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from kvc_trt.errors import InputError, did_you_mean
from kvc_trt.tasks import (
    associative_recall,
    common_words,
    frequent_words,
    lines,
    multi_instruction,
    needles,
    passkey,
    variable_tracking,
)
from kvc_trt.tasks.needles import Variant
from kvc_trt.tasks.sample import Encode, Generate, TaskSample
from kvc_trt.tasks.scoring import Score, last_integer, position_match, string_match_all

Reads = Literal["text", "ids"]
RULER_NEEDLE_TOKENS = 128
_KINDS: dict[type, str] = {float: "a number", int: "a whole number", str: "a word"}


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
    scored: str
    """The score in words."""
    reads: Reads = "text"
    options: Mapping[str, type] = field(default_factory=dict)
    """What `generate` takes beyond the arguments of every task, and of which type."""

    def sample(
        self,
        *,
        seed: int,
        index: int,
        target_tokens: int,
        encode: Encode,
        max_new_tokens: int | None = None,
        **options: Any,
    ) -> TaskSample:
        """Sample `index` under options of this task; `max_new_tokens` None is the task's own."""
        for name, value in options.items():
            self._check_option(name, value)
        generate: Any = self.generate  # which options it takes is known from `options`, not from its type
        sample: TaskSample = generate(
            seed=seed,
            index=index,
            target_tokens=target_tokens,
            encode=encode,
            max_new_tokens=self.max_new_tokens if max_new_tokens is None else max_new_tokens,
            **options,
        )
        return sample

    def _check_option(self, name: str, value: object) -> None:
        if name not in self.options:
            raise InputError(
                f"task {self.name} has no option {name!r}{did_you_mean(name, self.options)}",
                hint=f"options: {', '.join(self.options)}" if self.options else None,
            )
        kind = self.options[name]
        accepted = (int, float) if kind is float else (kind,)
        if isinstance(value, bool) or not isinstance(value, accepted):
            raise InputError(f"task {self.name}: {name} is {value!r}, expected {_KINDS[kind]}")


def _needles(name: str, summary: str, variant: Variant, max_new_tokens: int = RULER_NEEDLE_TOKENS) -> Task:
    generate = partial(needles.generate_needles, task=name, variant=variant)
    return Task(name, "needles", summary, max_new_tokens, generate, string_match_all, MEAN, options={"depth": float})


MEAN = "share of the references that the answer contains"
_ALL = (
    Task(
        "passkey",
        "needles",
        "seven digits at a depth of a text that repeats itself",
        passkey.MAX_NEW_TOKENS,
        passkey.generate,
        string_match_all,
        MEAN,
        options={"depth": float},
    ),
    _needles("niah-single-1", "one number in filler that repeats itself", Variant("noise"), needles.MAX_NEW_TOKENS),
    _needles("niah-single-2-prose", "one number in prose", Variant("prose")),
    _needles("niah-single-3-prose", "one UUID in prose", Variant("prose", value_kind="uuids")),
    _needles("niah-multikey-1-prose", "one of four numbers in prose", Variant("prose", keys=4)),
    _needles("niah-multikey-2", "one number where every line gives one", Variant("needles"), needles.MAX_NEW_TOKENS),
    _needles(
        "niah-multikey-3",
        "one UUID where every line gives one, keys are UUIDs",
        Variant("needles", key_kind="uuids", value_kind="uuids"),
    ),
    _needles(
        "niah-multivalue",
        "the four numbers of one key, in filler",
        Variant("noise", values_per_key=4),
        needles.MAX_NEW_TOKENS,
    ),
    _needles("niah-multivalue-prose", "the four numbers of one key, in prose", Variant("prose", values_per_key=4)),
    _needles(
        "niah-multiquery",
        "the numbers of four keys, in filler",
        Variant("noise", keys=4, asked=4),
        needles.MAX_NEW_TOKENS,
    ),
    _needles("niah-multiquery-prose", "the numbers of four keys, in prose", Variant("prose", keys=4, asked=4)),
    Task(
        variable_tracking.NAME,
        "tracing",
        "all variables of a chain of assignments over four hops",
        variable_tracking.MAX_NEW_TOKENS,
        variable_tracking.generate,
        string_match_all,
        MEAN,
    ),
    Task(
        common_words.NAME,
        "aggregation",
        "the ten words that a numbered list repeats most",
        common_words.MAX_NEW_TOKENS,
        common_words.generate,
        string_match_all,
        MEAN,
    ),
    Task(
        frequent_words.NAME,
        "aggregation",
        "the three most frequent coded words",
        frequent_words.MAX_NEW_TOKENS,
        frequent_words.generate,
        string_match_all,
        MEAN,
    ),
    Task(
        lines.TASK,
        "lines",
        "the number of one line of many",
        lines.MAX_NEW_TOKENS,
        lines.generate_lines,
        last_integer,
        "whether the last integer of the answer is the reference",
        options={"key_kind": str, "depth": float},
    ),
    Task(
        associative_recall.NAME,
        "recall",
        "the value behind each of several keys, as token ids",
        associative_recall.SECTION_TOKENS,
        associative_recall.generate,
        position_match,
        "share of the keys behind which the reference is predicted",
        reads="ids",
        options={"vocabulary_size": int, "pairs": int, "asked": int},
    ),
    Task(
        multi_instruction.NAME,
        "needles",
        "several numbers in prose, each asked for by an instruction of its own",
        multi_instruction.MAX_NEW_TOKENS,
        multi_instruction.generate,
        string_match_all,
        MEAN,
        options={"facts": int, "instructions": int},
    ),
)
TASKS: dict[str, Task] = {one.name: one for one in _ALL}


def task(name: str) -> Task:
    """The task of that name; InputError names the nearest one."""
    if name not in TASKS:
        raise InputError(f"unknown task {name!r}{did_you_mean(name.lower(), TASKS)}", hint="kvc-trt tasks lists them")
    return TASKS[name]
