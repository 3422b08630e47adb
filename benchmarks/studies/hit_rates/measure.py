"""SnapKV's study of hit rates: does the end of a prompt point at the tokens that the answer uses (arXiv 2404.14469, 3
and 4.2)?

    python -m benchmarks.studies hit_rates [--minutes 60] [--long]

The formula is equations 2 to 8 of the NeurIPS version; its preprint has the two numbers, a threshold of 0.05 and a
twentieth of the prefix. Attention is that of the whole cache. The first tokens of a text draw attention under any
question, and any policy keeps them; so every figure is also given without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from benchmarks.studies import texts
from benchmarks.studies.records import Records
from benchmarks.studies.study import Run, measure_lacking
from benchmarks.studies.texts import AT_BEGINNING, AT_END, POSITIONS
from benchmarks.studies.watched import AttentionLayer, Sampling, StudyModel, open_study_model

NAME = "hit_rates"
SINKS = 4
"""First tokens of a text, which are left out of the second figure."""
LONG_ANSWER = "Explain the text to a beginner, part by part, in as many words as you need."
SHORTEST = 4
"""Tokens of the shortest answer to an instruction."""
LONGEST = 4096
"""Tokens of the longest prompt with its answer."""
ASKED = ("manual", "log", "facts")
"""Kinds of documents that several instructions ask about."""
DOCUMENTS = 20
"""Documents of each part that are measured unless asked otherwise; those of instructions are of all kinds."""
TOGETHER = 4
"""Documents of one record of windows."""
WINDOWS, INSTRUCTIONS = "windows", "instructions"
"""The two parts of the study."""


@dataclass(frozen=True)
class Settings:
    """Lengths, windows and thresholds of a measurement."""

    threshold: float = 0.05
    """Attention above which a token is important to a query (the preprint's theta)."""
    kept: float = 0.05
    """Share of the prefix that a head's votes choose (the preprint's p)."""
    window: int = 64
    """Tokens of a window, along the prompt and along the answer (128 in the paper)."""
    windows: int = 10
    """Windows along the prompt, the last ones (20 in the paper)."""
    answer_windows: int = 4
    document: int = 800
    """Tokens of a document whose answer is followed over windows."""
    observed: int = 32
    """Last tokens of a prompt that vote where the place of the instruction is studied: SnapKV's window on LongBench."""
    asked_document: int = 400
    """Tokens of a document that several instructions ask about."""
    asked_answer: int = 48
    """Longest answer there."""


LONG = Settings(window=128, windows=20, document=3000, asked_document=3000, asked_answer=128)
"""The paper's windows and number of windows; documents as long as its shortest dialogues."""


def hit_rate(important: Tensor, voted: Tensor) -> Tensor:
    """Return the share of important features that were voted for (equations 7 and 8).

    Both are masks [...,N,L] over heads and tokens; the result is [...], NaN where nothing is important.
    """
    return (important & voted).sum(dim=(-2, -1)) / important.sum(dim=(-2, -1))


def vote(attention: Tensor, count: int) -> Tensor:
    """Mark the `count` tokens of each head with the most attention (equations 2 to 5): [N,R,L] -> [N,L].

    R are the queries of the window that votes. The lower token wins a tie.
    """
    votes = attention.sum(dim=1)
    chosen = torch.sort(votes, dim=-1, descending=True, stable=True).indices[:, :count]
    return torch.zeros_like(votes, dtype=torch.bool).scatter_(1, chosen, True)


def important(attention: Tensor, threshold: float) -> Tensor:
    """Mark the tokens to which each query attends with more than `threshold` (equation 6): [N,R,L] -> [R,N,L]."""
    return (attention > threshold).transpose(0, 1)


def recent(votes: Tensor, count: int) -> Tensor:
    """Mark the tokens that StreamingLLM would keep of the prefix, the first SINKS and the last tokens, as a control."""
    mask = torch.zeros_like(votes)
    mask[:, :SINKS] = True
    mask[:, votes.shape[1] - (count - SINKS) :] = True
    return mask


def without_sinks(mask: Tensor) -> Tensor:
    """Return a mask in which the first SINKS tokens count for nothing."""
    return mask & (torch.arange(mask.shape[-1]) >= SINKS)


def mean_rate(used: Tensor, voted: Tensor) -> float:
    """Return the mean of the hit rates of single queries, [R,N,L] and [N,L]; NaN where none has anything important."""
    return float(hit_rate(used, voted).nanmean())


def both_ways(used: Tensor, voted: Tensor) -> tuple[float, float]:
    """Return the mean rate as published, and without the first tokens."""
    return mean_rate(used, voted), mean_rate(without_sinks(used), voted)


def along_windows(model: StudyModel, settings: Settings, first: int) -> dict[str, Any]:
    """Follow the long answers of TOGETHER documents: the tokens that windows of a prompt vote for, and those that
    windows of an answer use.

    By document and layer: `prompt` and `answer` are pairs (as published, without sinks) for each window.
    """
    documents = [texts.manual(model.tokenizer, first + place, settings.document) for place in range(TOGETHER)]
    prompts = [document.prompt(model.framing, LONG_ANSWER) for document in documents]
    tokens = settings.answer_windows * settings.window
    sampling = Sampling(tokens, at_least=tokens)
    answers = model.answers(prompts, sampling, seed=first)
    return {
        "documents": [
            {
                "prompt_tokens": len(prompt),
                "distinct": distinct_share(answer.tokens),
                "layers": [windows_of(settings, layer, len(prompt)) for layer in answer.layers],
            }
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
    }


def windows_of(settings: Settings, layer: AttentionLayer, end: int) -> dict[str, Any]:
    """Return the rates of one layer along a prompt of `end` tokens and its answer."""
    size, last = settings.window, layer.query.shape[1]
    prefix = end - size
    starts = range(end - settings.windows * size, end, size)
    voted = [vote(layer.attention(start, start + size, prefix), int(settings.kept * prefix)) for start in starts]
    firsts = range(end, last, size)
    used = [important(layer.attention(at, at + size, prefix), settings.threshold) for at in firsts]
    every = torch.cat(used)
    return {
        "prompt": [both_ways(every, one) for one in voted],
        "answer": [both_ways(one, voted[-1]) for one in used],
        "recent": both_ways(every, recent(voted[-1], int(settings.kept * prefix))),
        "important": float(every.sum(dim=(1, 2)).float().mean()) / every.shape[1],
    }


def distinct_share(tokens: Sequence[int]) -> float:
    """Return the share of runs of four tokens that are not repetitions: small where a model goes in circles."""
    runs = list(zip(*(tokens[start:] for start in range(4)), strict=False))
    return len(set(runs)) / len(runs) if runs else 1.0


def about_one_document(model: StudyModel, settings: Settings, kind: str, index: int) -> dict[str, Any]:
    """Ask one document several things, each at its end and at its beginning, and the first thing twice.

    By layer: `pairs`, the overlap of the tokens that different instructions with their answers vote for; `same`, of two
    answers to one instruction; `end` and `beginning`, hit rates of the last tokens of a prompt on its answer.
    """
    document = texts.KINDS[kind](model.tokenizer, index, settings.asked_document)
    first = document.instructions[0]
    asked = [(AT_END, one) for one in (*document.instructions, first)]
    asked += [(AT_BEGINNING, one) for one in document.instructions]
    prompts = [document.prompt(model.framing, one, position) for position, one in asked]
    answers = model.answers(prompts, Sampling(settings.asked_answer, at_least=SHORTEST), seed=index)
    shared = common_beginning([prompt for prompt, (position, _) in zip(prompts, asked, strict=True)
                               if position == AT_END])  # fmt: skip
    seen = [
        _Asked.of(settings, len(prompt), answer.layers, shared if position == AT_END else None)
        for prompt, answer, (position, _) in zip(prompts, answers, asked, strict=True)
    ]
    at_end = [one for one, (position, _) in zip(seen, asked, strict=True) if position == AT_END]
    again, different = at_end[-1], at_end[:-1]
    rates = {
        position: [one.rates for one, (where, _) in zip(seen, asked, strict=True) if where == position]
        for position in POSITIONS
    }
    return {
        "prompt_tokens": len(prompts[0]),
        "answer_tokens": [len(one.tokens) for one in answers],
        "pairs": _overlaps(list(combinations(different, 2))),
        "same": _overlaps([(different[0], again)]),
        **{position: _by_layer(some) for position, some in rates.items()},
    }


@dataclass
class _Asked:
    """One prompt with its answer."""

    voted: list[Tensor]
    """By layer: the votes of instruction and answer in the document [N,L]; empty where these are not asked for."""
    rates: list[tuple[float, float]]
    """By layer: hit rates of the prompt's last tokens on the answer."""

    @classmethod
    def of(cls, settings: Settings, end: int, layers: Sequence[AttentionLayer], document: int | None) -> _Asked:
        """Count in the layers of a prompt of `end` tokens and its answer; `document` tokens of it may get votes."""
        found, prefix = cls([], []), end - settings.observed
        for layer in layers:
            last = layer.query.shape[1]
            if document is not None:
                votes = layer.attention(document, last, document)
                found.voted.append(vote(votes, int(settings.kept * document)))
            seen = layer.attention(prefix, end, prefix)
            used = important(layer.attention(end, last, prefix), settings.threshold)
            found.rates.append(both_ways(used, vote(seen, int(settings.kept * prefix))))
        return found


def common_beginning(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many first tokens all prompts share."""
    for place, tokens in enumerate(zip(*prompts, strict=False)):
        if len(set(tokens)) > 1:
            return place
    return min(map(len, prompts))


def _overlaps(pairs: Sequence[tuple[_Asked, _Asked]]) -> list[tuple[float, float]]:
    """Return, by layer, the mean overlap of pairs, as published and without the first tokens."""
    found = []
    for one, other in pairs:
        masks = zip(one.voted, other.voted, strict=True)
        found.append([(float(hit_rate(a, b)), float(hit_rate(without_sinks(a), b))) for a, b in masks])
    return _by_layer(found)


def _by_layer(found: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return, by layer, the mean over prompts or pairs that have something important in that layer."""
    return [(float(a), float(b)) for a, b in torch.tensor(found).nanmean(dim=0)]


def measure(run: Run, kept: Records) -> None:
    """Measure the missing records, some documents at a time."""
    settings, documents = LONG if run.long else Settings(), run.count or DOCUMENTS
    model = open_study_model(run.model, LONGEST, run.checkpoint)
    measure_lacking(run, kept, keys(model, settings, documents), lambda key: of_key(model, settings, key))


def of_key(model: StudyModel, settings: Settings, key: Mapping[str, Any]) -> dict[str, Any]:
    """Measure the record of one key."""
    if key["part"] == WINDOWS:
        return along_windows(model, settings, key["index"])
    return about_one_document(model, settings, key["kind"], key["index"])


def keys(model: StudyModel, settings: Settings, documents: int) -> Iterator[dict[str, Any]]:
    """Yield the keys of all measurements, in an order that leaves a stopped run with about as many of each kind."""
    head = {"model": model.name, "checkpoint": model.fingerprint, **asdict(settings)}
    for index in range(documents):
        if index % TOGETHER == 0:
            yield {**head, "part": WINDOWS, "kind": "manual", "index": index, "documents": TOGETHER}
        if index % len(ASKED) == 0:
            for kind in ASKED:
                yield {**head, "part": INSTRUCTIONS, "kind": kind, "index": index // len(ASKED)}
