"""RocketKV's two stages on needles: the share of attention that each keeps, and its cost (arXiv 2502.14051).

    python -m benchmarks.studies two_stages [--minutes 60] [--count 16] [--long]

One reading of a prompt serves all cells (`cells.py`) and both places of the question: in the prompt, whose compaction
then sees it, or behind it. Stage one loses the tokens that it evicts, stage two those that are kept and not read; so
attention and the exact best tokens of the whole cache are counted after each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.studies.pooling.measure import found
from benchmarks.studies.records import Record, Records, of_kind
from benchmarks.studies.study import Run, measure_lacking
from benchmarks.studies.two_stages.cells import OUTPUT, Cell, cells
from benchmarks.studies.two_stages.choices import Prompt, read, unread
from benchmarks.studies.watched import Branch, Following, Seen, StudyModel, WatchedLayer, open_study_model
from kvc_trt.models.config import ModelConfig
from kvc_trt.reference.selection import gather_rows
from kvc_trt.tasks.framing import FramedIds
from kvc_trt.tasks.registry import task

NAME = "two_stages"
TASK = "niah-single-1"


@dataclass(frozen=True)
class Needles:
    """The needles of a study, and the cells under which it asks for them."""

    lengths: Mapping[int, float]
    """Lengths of prompt and answer, and the share of needles that are hidden there."""
    cells: Callable[[ModelConfig, int], list[Cell]]
    """Cells for prompts of a length."""
    tasks: tuple[str, ...] = (TASK,)
    count: int = 20
    """The number hidden at each length for each task unless asked otherwise."""

    @property
    def longest(self) -> int:
        """The longest prompt with its answer."""
        return max(self.lengths)


NEEDLES = Needles({2048: 1.0, 4096: 0.25, 8064: 0.25}, cells)
"""8064 leaves room for the answer."""
ROOM = 128
"""Positions behind the longest prompt for its answer."""
SINKS = 4
"""First tokens of a prompt that do not count as attention: every cell keeps them, and they get most of it."""
BEST = 64
"""Most attended tokens of the whole cache that a KV head's list is compared with."""
IN, BEHIND = "in the prompt", "behind the prompt"
"""Places of the question."""
FIELDS = ("stored", "read", "found", "divergence", "attention_kept", "attention_read", "best_kept", "best_read")
"""By cell: pairs stored and read, 1 if the needle is found, nats per token of the whole cache's answer, shares of
the whole cache's attention to the prompt, and of its BEST tokens, that are kept and read."""


class Staged:
    """The whole cache, and behind it all cells; counts the shares of the whole cache's attention that they keep and
    read."""

    def __init__(self, of: Sequence[Cell], first: int) -> None:
        """Count from the step `first` on: those before feed the question."""
        self._cells, self._first, self._layers = of, first, 0
        self._sums = torch.zeros(len(of), 4)
        self._own = torch.zeros(len(of), 0)

    @property
    def count(self) -> int:
        """The number of caches, the whole one among them."""
        return 1 + len(self._cells)

    @property
    def shares(self) -> list[list[float]]:
        """For each cell: attention kept and read, best tokens kept and read, means over layers."""
        return (self._sums / self._layers).tolist()

    @property
    def own(self) -> list[list[float]]:
        """For each cell and step: the share of KV heads, of all layers, that read the step's own token."""
        return (self._own / self._layers).tolist()

    def seen(self, layer: WatchedLayer, following: Following) -> Iterator[Seen]:
        """Yield the masks of each cache; layers follow each other."""
        self._layers += 1
        if self._layers == 1:
            self._own = torch.zeros(len(self._cells), following.new)
        prompt, new, n = Prompt(layer), following.new, layer.keys.shape[1]
        visible = torch.arange(n + new) <= torch.arange(n, n + new)[:, None]
        yield Seen(visible)
        query, keys = following.query, following.keys.transpose(1, 2)
        whole = self._attention(layer, query[0], keys[0], visible)
        best = whole.topk(min(BEST, n), dim=-1).indices
        for place, cell in enumerate(self._cells, 1):
            kept = prompt.kept(cell.first, cell.kept)
            every = kept.shape[1] == n
            old = layer.keys if every else gather_rows(layer.keys, kept)
            together = torch.cat([old, keys[place]], dim=1)
            mask = read(cell.second, query[place], together, kept.shape[1])
            self._own[place - 1] += mask[:, :, kept.shape[1] :].diagonal(dim1=1, dim2=2).float().mean(dim=0)
            self._sums[place - 1] += counted(whole, kept, mask[:, self._first :, : kept.shape[1]], best)
            share = unread(cell.second, query[place], together, mask)
            yield Seen(mask, None if every else kept, share)

    def _attention(self, layer: WatchedLayer, query: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
        """Return the whole cache's attention to the prompt but its first tokens, from the answer on, summed over the
        heads of a group: [G,M',n]."""
        (_, n, size), new = layer.query.shape, len(query)
        grouped = query.transpose(0, 1).reshape(len(keys), -1, new, size)
        logits = grouped @ torch.cat([layer.keys, keys], dim=1)[:, None].transpose(2, 3) / size**0.5
        found = torch.softmax(logits.masked_fill(~visible, -torch.inf), dim=-1).sum(dim=1)[:, self._first :, :n]
        found[..., :SINKS] = 0
        return found


def counted(whole: Tensor, kept: Tensor, mask: Tensor, best: Tensor) -> Tensor:
    """Return the shares of one layer: attention kept, attention read, best tokens kept, best tokens read.

    whole [G,M,n] is attention; kept [G,B] positions; mask [G,M,B] is true for those read; best [G,M,BEST] positions.
    """
    groups, steps, n = whole.shape
    of_kept = whole.gather(2, kept[:, None].expand(groups, steps, -1))
    sums = torch.stack([of_kept.sum(), (of_kept * mask).sum()]) / whole.sum()
    # The places of the best tokens among the kept ones; tokens that were evicted have the place B, which is not read.
    places = torch.full((groups, n), kept.shape[1]).scatter_(1, kept, torch.arange(kept.shape[1]).expand_as(kept))
    at = places.gather(1, best.flatten(1)).view_as(best)
    is_read = torch.nn.functional.pad(mask, (0, 1)).gather(2, at)
    return torch.cat([sums, torch.stack([(at < kept.shape[1]).float().mean(), is_read.float().mean()])])


def divergence(whole: Tensor, other: Tensor) -> float:
    """Return the mean KL(whole || other) of logits [M,vocab], in nats per token."""
    one, two = (torch.log_softmax(logits, dim=-1) for logits in (whole, other))
    return float((one.exp() * (one - two)).sum(dim=-1).mean())


def asked(
    model: StudyModel, length: int, depth: float, index: int, of: str = TASK
) -> tuple[Sequence[int], FramedIds, list[int]]:
    """Hide one needle; return the prompt with the question, its parts, and the answer, as token ids."""
    sample = task(of).sample(
        seed=0, index=index, target_tokens=length, encode=model.framing.encode, max_new_tokens=16, depth=depth
    )
    prompt, framed = model.framing.ids(sample, query_aware=True).context, model.framing.ids(sample, query_aware=False)
    if prompt != framed.context + framed.question:
        raise ValueError("a prompt with its question is not that without it and the question")
    answer = model.tokenizer.tokenizer.encode(f" {sample.answers[0]}", add_special_tokens=False).ids
    return prompt, framed, answer


def depth_of(index: int) -> float:
    """Return where a needle is hidden, 0..1, by the golden section: any beginning of them is spread evenly."""
    return round((0.5 + 0.618 * index) % 1, 3)


def hidden(model: StudyModel, needles: Needles, key: Mapping[str, Any]) -> dict[str, Any]:
    """Hide the needle of a record's key, and ask for it in the prompt and behind it under the key's cells."""
    prompt, framed, answer = asked(model, key["length"], key["depth"], key["index"], key["task"])
    config = model.decoder.config
    every = [one for one in needles.cells(config, key["length"]) if one.name in key["cells"]]
    staged = {IN: Staged(every, 0), BEHIND: Staged(every, len(framed.question) - 1)}
    logits = model.decoder.branches(prompt, [
        Branch(len(prompt), answer, staged[IN]),
        Branch(len(framed.context), [*framed.question, *answer], staged[BEHIND], wanted=len(answer)),
    ])  # fmt: skip
    measured: dict[str, Any] = {"prompt_tokens": len(prompt)}
    for (place, one), (whole, *others) in zip(staged.items(), logits, strict=True):
        # The prompt's last token is read exactly under all cells: its logits, the first, are equal.
        first = 1 if place == IN else 0
        measured[place] = {
            "whole": int(found(whole, answer)),
            "cells": {
                cell.name: [
                    cell.stored, cell.read(config.head_size), int(found(each, answer)),
                    divergence(whole[first:], each[first:]), *shares,
                ]
                for cell, each, shares in zip(every, others, one.shares, strict=True)
            },
        }  # fmt: skip
    return measured


def measure_needles(needles: Needles, run: Run, kept: Records) -> None:
    """Measure the missing records, needle by needle."""
    model = open_study_model(run.model, needles.longest + ROOM, run.checkpoint)
    wanted = keys(model, needles, run, kept.all)
    measure_lacking(run, kept, wanted, lambda key: hidden(model, needles, key))


measure = partial(measure_needles, NEEDLES)


def keys(model: StudyModel, needles: Needles, run: Run, known: Sequence[Record] = ()) -> Iterator[Mapping[str, Any]]:
    """Yield the keys of all measurements, in an order that leaves a stopped run with about these shares of lengths.

    A needle that is known is asked for under the cells that its records lack.
    """
    names = [cell.name for cell in needles.cells(model.decoder.config, needles.longest)]
    head = {"model": model.name, "checkpoint": model.fingerprint, "output": OUTPUT}
    for index in range(run.count or needles.count):
        for length, share in needles.lengths.items():
            share = 1.0 if run.long else share
            if int((index + 1) * share) == (place := int(index * share)):
                continue
            for of in needles.tasks:
                needle = {**head, "task": of, "length": length, "depth": depth_of(place), "index": place}
                measured = {name for one in of_kind(known, **needle) for name in one["key"]["cells"]}
                if lacking := [name for name in names if name not in measured]:
                    yield {**needle, "cells": lacking}
