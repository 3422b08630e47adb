"""SqueezeAttention's study of layers (arXiv 2404.04793, figure 2, tables 6, 7 and 8).

    python -m benchmarks.studies layer_importance [--minutes 60]

The cosine between the residual stream before and after a layer's attention says how little the layer changes it. It is
measured for every token of prompts of several kinds. Then a true summary is fed behind a log under caches that keep a
fifth of the prompt, divided between layers by the prompt's own cosines with several shares p.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.studies import texts
from benchmarks.studies.records import Records
from benchmarks.studies.squeeze.caches import Together
from benchmarks.studies.study import Run, measure_lacking
from benchmarks.studies.watched import Recent, StudyModel, WatchedLayer, open_study_model
from kvc_trt.reference.model.squeeze import squeeze
from kvc_trt.tasks.registry import task

NAME = "layer_importance"
COSINES, SWEEP = "cosines", "sweep"
"""The two parts of the study."""
LONGEST = 1024
TOGETHER = 10
"""Prompts of one record of cosines."""
PROMPTS = 40
"""Prompts of each kind (200 in all, as in the paper), and of the sweep, that are measured unless asked otherwise."""
SHARES = tuple(round(0.1 * tenth, 1) for tenth in range(1, 11))
"""The values of p in the paper's table 6."""
SINKS = 4
"""Sinks of StreamingLLM, as in the paper."""
POLICIES = {"sliding-window": 0, "streaming-llm": SINKS}
"""The policies of the sweep, with their sinks."""
WHOLE = "whole cache"


@dataclass(frozen=True)
class Settings:
    """Lengths and budget of a measurement."""

    document: int = 230
    """Tokens of the document in a prompt whose cosines are measured."""
    positions: int = 256
    """First tokens of a prompt that the map shows."""
    bin: int = 4
    """Tokens whose cosines are averaged in the map."""
    swept_prompt: int = 512
    """Tokens of the log and its summary."""
    summary: int = 64
    budget: float = 0.2
    """Share of the prompt that a layer keeps on average (table 6)."""


def cosines(model: StudyModel, prompt: Sequence[int]) -> Tensor:
    """Return the cosine around every layer's attention for every token: [L,n] (equation 5)."""
    found: list[Tensor] = []

    def visit(layer: WatchedLayer) -> None:
        found.append(torch.cosine_similarity(layer.before, layer.after, dim=-1))

    model.decoder.watch(prompt, visit)
    return torch.stack(found)


def cosines_of(model: StudyModel, settings: Settings, kind: str, first: int) -> dict[str, Any]:
    """Measure some prompts of a kind: the means of each one's layers, and the map of them all together."""
    means, maps = [], []
    for index in range(first, first + TOGETHER):
        document = texts.KINDS[kind](model.tokenizer, index, settings.document)
        prompt = document.prompt(model.framing, document.instructions[index % len(document.instructions)])
        found = cosines(model, prompt)
        means.append(found.mean(dim=1).tolist())
        maps.append(binned(found, settings.positions, settings.bin))
    return {"means": means, "map": torch.stack(maps).nanmean(dim=0).tolist()}


def binned(found: Tensor, positions: int, size: int) -> Tensor:
    """Average neighbours of the first positions: [L,n] -> [L,positions/size]; NaN past a prompt's end."""
    padded = torch.nn.functional.pad(found[:, :positions], (0, max(0, positions - found.shape[1])), value=torch.nan)
    return padded.reshape(len(found), -1, size).nanmean(dim=2)


def swept(model: StudyModel, settings: Settings, index: int) -> dict[str, Any]:
    """Measure the surprise of one true summary, in nats a token: with the whole cache, and under each policy and p."""
    summary = task("log-summary")
    sample = summary.sample(
        seed=1, index=index, target_tokens=settings.swept_prompt, encode=model.framing.encode,
        max_new_tokens=settings.summary,
    )  # fmt: skip
    prompt = model.framing.ids(sample, query_aware=True).context
    following = model.framing.continuation(sample)[: settings.summary]
    n = len(prompt)
    layers = cosines(model, prompt).mean(dim=1).tolist()
    budget = int(settings.budget * n)
    everything = [n + len(following)] * len(layers)
    divided = [division(layers, budget, share, n) for share in SHARES]
    caches = Together(Recent([everything], 0), *(Recent(divided, sinks) for sinks in POLICIES.values()))
    whole, *others = (surprise(one, following) for one in model.decoder.along(prompt, following, caches))
    found: dict[str, Any] = {"prompt_tokens": n, "summary_tokens": len(following), WHOLE: whole}
    for place, name in enumerate(POLICIES):
        found[name] = others[place * len(SHARES) : (place + 1) * len(SHARES)]
    return found


def division(layers: Sequence[float], budget: int, share: float, longest: int) -> tuple[int, ...]:
    """Divide a cache between layers as algorithm 1 does, by their cosines; no layer keeps more than the prompt."""
    return squeeze(layers, budget, share=share, minimum=SINKS + 1, maximum=longest).budgets


def surprise(logits: Tensor, following: Sequence[int]) -> float:
    """Return the mean negative log-likelihood of the tokens that logits [M,vocab] predict."""
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(following)))


def mean_layers(means: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean over prompts, by layer."""
    return [statistics.fmean(column) for column in zip(*means, strict=True)]


def measure(run: Run, kept: Records) -> None:
    """Measure the missing records, some prompts at a time."""
    settings, prompts = Settings(), run.count or PROMPTS
    model = open_study_model(run.model, LONGEST, run.checkpoint)
    measure_lacking(run, kept, keys(model, settings, prompts), lambda key: of_key(model, settings, key))


def of_key(model: StudyModel, settings: Settings, key: Mapping[str, Any]) -> dict[str, Any]:
    """Measure the record of one key."""
    if key["part"] == COSINES:
        return cosines_of(model, settings, key["kind"], key["index"])
    return swept(model, settings, key["index"])


def keys(model: StudyModel, settings: Settings, prompts: int) -> Iterator[dict[str, Any]]:
    """Yield the keys of all measurements, in an order that leaves a stopped run with about as many of each kind."""
    head = {"model": model.name, "checkpoint": model.fingerprint, **asdict(settings)}
    for first in range(0, prompts, TOGETHER):
        for kind in texts.KINDS:
            yield {**head, "part": COSINES, "kind": kind, "index": first, "prompts": TOGETHER}
        for index in range(first, min(first + TOGETHER, prompts)):
            yield {**head, "part": SWEEP, "index": index}
