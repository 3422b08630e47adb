"""SqueezeAttention's study of answers over budgets, with and without budgets by layer (arXiv 2404.04793, figure 3).

    python -m benchmarks.studies squeeze [--minutes 60] [--count 8]

Each of the paper's three policies keeps 10 to 100 % of a prompt, the same in every layer, or divided between layers by
the prompt's own cosines as `squeeze-online` does. Behind the prompt a text is fed: the true summary of a log, the next
text of a manual, or the number of a needle. One reading of a prompt serves all caches. Speed and cost are measured on
engines (`engines.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.accuracy.formats.divergence import plain_text
from benchmarks.studies.layer_importance.measure import cosines, surprise
from benchmarks.studies.pooling.measure import TASK, found, needle
from benchmarks.studies.records import Records
from benchmarks.studies.squeeze import engines
from benchmarks.studies.squeeze.caches import HeavyHitters, Together
from benchmarks.studies.study import Run, measure_lacking
from benchmarks.studies.two_stages.measure import depth_of, divergence
from benchmarks.studies.watched import Caches, Recent, StudyModel, open_study_model
from kvc_trt import policies
from kvc_trt.models.config import ModelConfig
from kvc_trt.reference.model.squeeze import squeeze
from kvc_trt.tasks.registry import task

NAME = "squeeze"
ANSWERS = "answers"
"""The part of the study that needs no engine."""
SUMMARY, MANUAL, NEEDLE = KINDS = ("summary of a log", "text of a manual", "needle")
SAMPLES = 8
"""Prompts of each kind that are measured unless asked otherwise."""
LENGTHS = {False: 512, True: 2048}
"""Tokens of a prompt with its continuation, without and with --long."""
FOLLOWING = 48
LONGEST = 4096
SHARES = tuple(round(0.1 * tenth, 1) for tenth in range(1, 11))
"""Shares of the prompt that a layer keeps on average: figure 3 has 10 to 100 %."""
POLICIES = ("sliding-window", "streaming-llm", "h2o")
WITHOUT, WITH = DIVISIONS = ("uniform", "squeeze-online")


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt and of its continuation."""

    prompt: int
    following: int


def division(
    config: ModelConfig, policy: str, share: float, kind: str, lengths: Lengths, layers: Sequence[float]
) -> tuple[int, ...]:
    """Return the tokens of every layer, as the engine of a policy would divide them for a prompt of these cosines."""
    rule = policies.resolve(
        policy, model=config, token_budget=f"{100 * share:g}%", max_input_len=lengths.prompt,
        max_output_len=lengths.following, layer_budget=kind,
    )  # fmt: skip
    if rule.division is None:
        return (rule.capacity - rule.spare_slots,) * len(layers)
    one = rule.division
    return squeeze(layers, one.budget, share=one.share, minimum=one.least, maximum=one.room(lengths.prompt)).budgets


def caches(config: ModelConfig, lengths: Lengths, layers: Sequence[float], shares: Sequence[float]) -> Caches:
    """Return the whole cache, then those of every policy, share and division, in this order."""
    every = [lengths.prompt + lengths.following] * len(layers)
    parts: list[Caches] = [Recent([every], 0)]
    for policy in POLICIES:
        divided = [division(config, policy, share, kind, lengths, layers) for share in shares for kind in DIVISIONS]
        parts.append(HeavyHitters(divided) if policy == "h2o" else Recent(divided, sinks_of(policy)))
    return Together(*parts)


def sinks_of(policy: str) -> int:
    """Return the first tokens that a policy keeps, as in the paper."""
    return 4 if policy == "streaming-llm" else 0


def text_of(model: StudyModel, kind: str, index: int, length: int) -> tuple[Sequence[int], list[int]]:
    """Return a prompt, and the tokens that are fed behind it; the last of them is only predicted."""
    if kind == NEEDLE:
        return needle(model, length, depth_of(index), index)
    if kind == MANUAL:
        ids = model.tokenizer.encode(plain_text())
        start = index * max(length, len(ids) // 101) % (len(ids) - length)
        piece = ids[start : start + length]
        return piece[:-FOLLOWING], list(piece[-FOLLOWING:])
    sample = task("log-summary").sample(
        seed=2, index=index, target_tokens=length, encode=model.framing.encode, max_new_tokens=FOLLOWING
    )
    prompt = model.framing.ids(sample, query_aware=True).context
    return prompt, list(model.framing.continuation(sample)[:FOLLOWING])


def answered(model: StudyModel, kind: str, index: int, length: int) -> dict[str, Any]:
    """Measure one prompt under all caches.

    Of a needle: is every token of its number the likeliest one (1 or 0)? Of other texts: the surprise of the true text,
    and the divergence of the distributions from the whole cache's, in nats a token. The prompt's last token is read
    exactly under every cache, so its logits do not count in a divergence.
    """
    prompt, following = text_of(model, kind, index, length)
    lengths = Lengths(len(prompt), len(following))
    layers = cosines(model, prompt).mean(dim=1).tolist()
    whole, *others = model.decoder.along(prompt, following, caches(model.decoder.config, lengths, layers, SHARES))
    measured: dict[str, Any] = {"prompt_tokens": len(prompt), "following_tokens": len(following), "cosines": layers}
    if kind == NEEDLE:
        return {
            **measured,
            "whole": int(found(whole, following)),
            "found": [int(found(one, following)) for one in others],
        }
    return {
        **measured,
        "whole": surprise(whole, following),
        "surprise": [surprise(one, following) for one in others],
        "divergence": [divergence(whole[1:], one[1:]) for one in others],
    }


def place(policy: str, share: float, kind: str) -> int:
    """Return where a cache stands in the lists of a record."""
    return (POLICIES.index(policy) * len(SHARES) + SHARES.index(share)) * len(DIVISIONS) + DIVISIONS.index(kind)


def measure(run: Run, kept: Records) -> None:
    """Measure the missing records: engines first, then answers, which can go on with more prompts."""
    model = open_study_model(run.model, LONGEST, run.checkpoint)

    def of_key(key: Mapping[str, Any]) -> dict[str, Any]:
        return answered(model, key["kind"], key["index"], key["length"])

    engines.measure(run, kept, model)
    measure_lacking(run, kept, keys(model, run), of_key)


def keys(model: StudyModel, run: Run) -> Iterator[Mapping[str, Any]]:
    """Yield the keys of all prompts, in an order that leaves a stopped run with about as many of each kind."""
    head = {
        "model": model.name, "checkpoint": model.fingerprint, "part": ANSWERS, "task": TASK, "policies": POLICIES,
        "shares": SHARES, "length": LENGTHS[run.long],
    }  # fmt: skip
    for index in range(run.count or SAMPLES):
        for kind in KINDS:
            yield {**head, "kind": kind, "index": index}
