"""Needles in a haystack: RULER's NIAH families [1] in wording of our own.

A needle is one sentence, `Entry <key> reads <value>.`; the question asks for the values of one key or of several. The
answer is greedy text, and the score is the share of values that it contains. Where a key has several values, its
needles say when it reads them (`first`, `then`, `later`, `finally`, in the order in which they appear), and so does the
answer: unlike RULER's, such needles differ in more than their values.

[1] C.-P. Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", arXiv:2404.06654.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import numpy as np

from kvc_trt.errors import InputError
from kvc_trt.tasks.haystack import SHORT_SENTENCES, FirstItems, fit_units, insert_needles, repeated
from kvc_trt.tasks.task import MATCH_ALL, Encode, Task, TaskSample, sample_rng, string_match_all
from kvc_trt.tasks.words import Kind, draw_distinct, prose

Haystack = Literal["noise", "prose", "needles"]
HAYSTACKS: tuple[Haystack, ...] = get_args(Haystack)
INTRODUCTION = "Remember what every entry reads."
COUNTS = ("one", "two", "three", "four")
TIMES = ("first", "then", "later", "finally")
DEPTHS = 40
MAX_NEW_TOKENS = 48
"""The longest answer in tasks that a shipped model learns: its answers end sooner than those of the original."""
RULER_TOKENS = 128


@dataclass(frozen=True)
class Arrangement:
    """The settings that distinguish the tasks of the family.

    `keys` needles of different keys, or `values_per_key` needles of each; the first `asked` keys are asked for. In a
    haystack of needles every unit is one more needle. Either one key is asked for, or keys have one value.
    """

    haystack: Haystack
    keys: int = 1
    values_per_key: int = 1
    asked: int = 1
    key_kind: Kind = "words"
    value_kind: Kind = "numbers"

    def __post_init__(self) -> None:
        """Raise InputError where no question can be phrased."""
        most = len(TIMES)
        if self.haystack not in HAYSTACKS:
            raise InputError(f"haystack is {self.haystack!r}, expected one of {', '.join(HAYSTACKS)}")
        if not (1 <= self.asked <= min(self.keys, most) and 1 <= self.values_per_key <= most):
            raise InputError(
                f"needles: {self.keys} keys, {self.asked} asked, {self.values_per_key} values per key; expected "
                f"1 <= asked <= keys, and at most {most} asked and {most} values"
            )
        if self.asked > 1 and self.values_per_key > 1:
            raise InputError("needles: several keys of several values each are asked, expected one of the two")


def generate_needles(
    *,
    task: str,
    arrangement: Arrangement,
    seed: int,
    index: int,
    target_tokens: int,
    encode: Encode,
    max_new_tokens: int = MAX_NEW_TOKENS,
    depth: float | None = None,
) -> TaskSample:
    """Sample `index` of the arrangement; the stream of random numbers is named after `task`.

    With `depth` in 0..1 no depths are drawn: all needles follow one another there, in order.
    """
    if depth is not None and not 0 <= depth <= 1:
        raise InputError(f"{task}: depth is {depth}, expected 0 to 1")
    rng = sample_rng(task, seed, index)
    in_haystack = target_tokens if arrangement.haystack == "needles" else 0  # a needle is at least one token
    keys = draw_distinct(rng, arrangement.key_kind, arrangement.keys + in_haystack)
    values = draw_distinct(rng, arrangement.value_kind, arrangement.keys * arrangement.values_per_key + in_haystack)
    gaps = np.sort(rng.permutation(DEPTHS)[: arrangement.keys * arrangement.values_per_key])
    depths = (gaps / (DEPTHS - 1)).tolist() if depth is None else [depth] * len(gaps)

    owners = rng.permutation(np.repeat(np.arange(arrangement.keys), arrangement.values_per_key))
    times = [int((owners[:i] == owner).sum()) for i, owner in enumerate(owners)]
    needles = [
        needle(keys[owner], value, when(time, arrangement.values_per_key))
        for owner, value, time in zip(owners, values, times, strict=False)
    ]
    asked = rng.permutation(arrangement.keys)[: arrangement.asked].tolist()
    answers = tuple(values[i] for owner in asked for i in np.flatnonzero(owners == owner))
    text = question([keys[i] for i in asked], arrangement.values_per_key, arrangement.value_kind)
    others = [needle(k, v) for k, v in zip(keys[arrangement.keys :], values[len(needles) :], strict=False)]
    streams = {"noise": repeated(SHORT_SENTENCES), "prose": prose(rng), "needles": iter(others)}
    filler = FirstItems(streams[arrangement.haystack])

    def context(units: int) -> str:
        return " ".join([INTRODUCTION, *insert_needles(filler.first(units), needles, depths)])

    units = fit_units(
        lambda units: context(units) + text,
        task=task,
        encode=encode,
        target_tokens=target_tokens,
        max_new_tokens=max_new_tokens,
        maximum=len(others) if arrangement.haystack == "needles" else None,
    )
    meta = {"depths": depths, "asked": [keys[i] for i in asked], "haystack": arrangement.haystack, "units": units}
    return TaskSample(task, seed, index, context(units), text, answers, meta)


def when(time: int, values_per_key: int) -> str:
    """Words between a needle's key and its value, with a space after them; empty if a key has one value."""
    return f"{TIMES[time]} " if values_per_key > 1 else ""


def needle(key: str, value: str, time: str = "") -> str:
    """Return the sentence to be found; `time` as `when` gives it."""
    return f"Entry {key} {time}reads {value}."


def question(keys: list[str], values_per_key: int = 1, value_kind: Kind = "numbers") -> str:
    """Question and prefix of the answer, for one key of several values or for several keys of one."""
    if values_per_key > 1:
        asks = f"which {COUNTS[values_per_key - 1]} {value_kind} does entry {keys[0]} read, in order"
    elif len(keys) > 1:
        asks = f"what do entries {', '.join(keys[:-1])} and {keys[-1]} read"
    else:
        asks = f"what does entry {keys[0]} read"
    return f"\nQuestion: {asks}? Answer: entry {keys[0]} {when(0, values_per_key)}reads"


def answer(keys: list[str], values: list[str]) -> str:
    """The text that follows `question` in an answer of the shipped model; `values` in the order asked for."""
    several = len(values) if len(keys) == 1 else 1
    rest = [
        f", entry {keys[i % len(keys)]} {when(i, several)}reads {value}" for i, value in enumerate(values[1:], start=1)
    ]
    return f" {values[0]}{''.join(rest)}."


def _task(name: str, summary: str, arrangement: Arrangement, max_new_tokens: int = RULER_TOKENS) -> Task:
    generate = partial(generate_needles, task=name, arrangement=arrangement)
    return Task(
        name, "needles", summary, max_new_tokens, generate, string_match_all, MATCH_ALL, options={"depth": float}
    )


TASKS = (
    _task("niah-single-1", "one number in filler that repeats itself", Arrangement("noise"), MAX_NEW_TOKENS),
    _task("niah-single-2-prose", "one number in prose", Arrangement("prose")),
    _task("niah-single-3-prose", "one UUID in prose", Arrangement("prose", value_kind="uuids")),
    _task("niah-multikey-1-prose", "one of four numbers in prose", Arrangement("prose", keys=4)),
    _task("niah-multikey-2", "one number where every line gives one", Arrangement("needles"), MAX_NEW_TOKENS),
    _task(
        "niah-multikey-3",
        "one UUID where every line gives one, keys are UUIDs",
        Arrangement("needles", key_kind="uuids", value_kind="uuids"),
    ),
    _task(
        "niah-multivalue",
        "the four numbers of one key, in filler",
        Arrangement("noise", values_per_key=4),
        MAX_NEW_TOKENS,
    ),
    _task("niah-multivalue-prose", "the four numbers of one key, in prose", Arrangement("prose", values_per_key=4)),
    _task(
        "niah-multiquery", "the numbers of four keys, in filler", Arrangement("noise", keys=4, asked=4), MAX_NEW_TOKENS
    ),
    _task("niah-multiquery-prose", "the numbers of four keys, in prose", Arrangement("prose", keys=4, asked=4)),
)
