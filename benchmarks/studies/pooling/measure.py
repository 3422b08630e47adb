"""SnapKV's studies of pooling, of window and kernel, and of needles (arXiv 2404.14469, 5.1.1, 5.2, table 2).

    python -m benchmarks.studies pooling [--minutes 60] [--long]

A needle is a number in prose, at some depth of a prompt that ends with the question. It is found under a cache if the
number's every token is the likeliest one there: the text of a greedy answer. One reading of the prompt serves all
caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.studies.records import Records
from benchmarks.studies.study import Run, measure_lacking
from benchmarks.studies.watched import Following, Seen, StudyModel, WatchedLayer, open_study_model
from kvc_trt.tasks.registry import task

NAME = "pooling"
TASK = "niah-single-2-prose"
LONGEST = 8192
NEEDLES = 4
"""The number hidden at each length and depth unless asked otherwise."""
NO_POOL = "none"
WINDOWS = (16, 32, 64)
POOLS = ((NO_POOL, 1), ("max", 5), ("max", 7), ("max", 9), ("max", 17), ("avg", 5), ("avg", 17))
"""Kinds of pooling with their kernels."""
CAPACITIES = (96, 128, 192, 256, 384)
"""Tokens of a prompt that each query head keeps, the window among them."""


@dataclass(frozen=True)
class Settings:
    """Lengths and depths of the needles of a measurement."""

    lengths: tuple[int, ...] = (512, 1024)
    """Tokens of prompt and answer."""
    depths: int = 8
    """Depths of needles, evenly spread from the beginning to the end."""


LONG = Settings(lengths=(1024, 2048, 4096))
"""For a machine with time."""


@dataclass(frozen=True)
class Variant:
    """One setting of SnapKV."""

    window: int
    pool: str
    kernel: int
    capacity: int


CONFIGURATIONS = [(window, pool, kernel) for window in WINDOWS for pool, kernel in POOLS]
VARIANTS = [Variant(*one, capacity) for one in CONFIGURATIONS for capacity in CAPACITIES]
"""Every configuration at every capacity, in the order of a record's scores."""


def pooled(votes: Tensor, kind: str, kernel: int) -> Tensor:
    """Spread votes [H,n] to neighbours (line 13 of listing 1)."""
    pad = kernel // 2
    if kind == "avg":
        return torch.nn.functional.avg_pool1d(votes[:, None], kernel, stride=1, padding=pad)[:, 0]
    return torch.nn.functional.max_pool1d(votes[:, None], kernel, stride=1, padding=pad)[:, 0]


class Observed:
    """SnapKV's choice of a prompt's tokens under several settings: listing 1, for each query head."""

    def __init__(self, variants: Sequence[Variant]) -> None:
        self._variants = variants

    @property
    def count(self) -> int:
        """The number of settings."""
        return len(self._variants)

    def seen(self, layer: WatchedLayer, following: Following) -> Iterator[Seen]:
        """Yield the masks [H,M,n+M]: the kept tokens, the window, and the new tokens up to each one."""
        (heads, n, _), new = layer.query.shape, following.new
        recent = torch.ones(new, new, dtype=torch.bool).tril().expand(heads, new, new)
        votes: dict[int, Tensor] = {}
        order: dict[tuple[int, str, int], Tensor] = {}
        for one in self._variants:
            before = n - one.window
            if one.window not in votes:
                votes[one.window] = layer.attention(before, n, before).sum(dim=1)
            key = (one.window, one.pool, one.kernel)
            if key not in order:
                scores = pooled(votes[one.window], one.pool, one.kernel)
                order[key] = torch.sort(scores, dim=-1, descending=True, stable=True).indices
            kept = torch.zeros(heads, n, dtype=torch.bool)
            kept[:, before:] = True
            kept.scatter_(1, order[key][:, : one.capacity - one.window], True)
            yield Seen(torch.cat([kept[:, None].expand(heads, new, n), recent], dim=-1))


@dataclass(frozen=True)
class BesideTheWhole:
    """The whole cache, and behind it others."""

    others: Observed

    @property
    def count(self) -> int:
        """The number of caches, the whole one among them."""
        return 1 + self.others.count

    def seen(self, layer: WatchedLayer, following: Following) -> Iterator[Seen]:
        """Yield the mask [M,n+M] of the whole cache, then those of the others."""
        n, new = layer.keys.shape[1], following.new
        yield Seen(torch.arange(n + new) <= torch.arange(n, n + new)[:, None])
        yield from self.others.seen(layer, following)


def needle(model: StudyModel, length: int, depth: float, index: int) -> tuple[tuple[int, ...], list[int]]:
    """Return a prompt, and the tokens that a right answer begins with."""
    sample = task(TASK).sample(
        seed=0, index=index, target_tokens=length, encode=model.framing.encode, max_new_tokens=16, depth=depth
    )
    prompt = model.framing.ids(sample, query_aware=True).context
    answer = model.tokenizer.tokenizer.encode(f" {sample.answers[0]}", add_special_tokens=False).ids
    return prompt, list(answer)


def found(logits: Tensor, answer: Sequence[int]) -> bool:
    """True if every token of the answer is the likeliest one."""
    return bool((logits.argmax(dim=-1) == torch.tensor(answer)).all())


def hidden(model: StudyModel, length: int, depth: float, index: int) -> dict[str, Any]:
    """Hide one needle: is it found with the whole cache, and (1 or 0) under each of VARIANTS?"""
    prompt, answer = needle(model, length, depth, index)
    logits = model.decoder.along(prompt, answer, BesideTheWhole(Observed(VARIANTS)))
    whole, *others = [int(found(one, answer)) for one in logits]
    return {"prompt_tokens": len(prompt), "whole": whole, "found": others}


def measure(run: Run, kept: Records) -> None:
    """Measure the missing records, needle by needle."""
    settings, needles = LONG if run.long else Settings(), run.count or NEEDLES
    model = open_study_model(run.model, LONGEST, run.checkpoint)

    def of_key(key: Mapping[str, Any]) -> dict[str, Any]:
        return hidden(model, key["length"], key["depth"], key["index"])

    measure_lacking(run, kept, keys(model, settings, needles), of_key)


def keys(model: StudyModel, settings: Settings, needles: int) -> Iterator[Mapping[str, Any]]:
    """Yield the keys of all measurements, in an order that leaves a stopped run with about as many of each kind."""
    grid = {"windows": WINDOWS, "pools": POOLS, "capacities": CAPACITIES}
    head = {"model": model.name, "checkpoint": model.fingerprint, "task": TASK, **asdict(settings), **grid}
    for index in range(needles):
        for place in range(settings.depths):
            depth = round(place / (settings.depths - 1), 3)
            for length in settings.lengths:
                number = index * settings.depths + place
                yield {**head, "length": length, "depth": depth, "index": number}
