"""How far caches in every format diverge from the whole fp32 cache, along plain text that nobody asks about.

    python -m benchmarks.accuracy.formats.divergence [--checkpoint FILE.gguf] [--lengths 2048,4096] [--minutes 60]

A prompt is a piece of the Python language's own documentation, which is part of every Python (`pydoc_data.topics`). Its
next 256 tokens are fed one by one to the whole cache and to each other one, and their distributions of the next token
are compared (`kvc_trt.accuracy.faithfulness`). One prefill serves all caches in one format. Writes
benchmarks/results/formats-divergence.json after every few prompts; a run goes on where the last one of the same commit
and machine stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import pydoc_data.topics
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.store import Growing
from kvc_trt.accuracy.answerers.answerer import SessionAnswerer
from kvc_trt.accuracy.answerers.model_under_test import Room
from kvc_trt.accuracy.answerers.policy_engines import PolicyEngines, open_model
from kvc_trt.accuracy.faithfulness import compare
from kvc_trt.accuracy.grid import Variant
from kvc_trt.accuracy.questions import Question
from kvc_trt.models.cache_formats import AUTO, CACHE_FORMATS
from kvc_trt.policies import BASELINE
from kvc_trt.progress import progress_on

MODEL = "smollm2-135m-instruct"
NAME = "formats-divergence"
LENGTHS = (2048, 4096, 8192)
"""Tokens of prompt and continuation together."""
CONTINUED = 256
PROMPTS = 12
BUDGETS = (512, 1024)
METHODS = (BASELINE, "rocketkv", "snapkv-gqa:pool_kernel=17", "tova", "hybrid")
TOGETHER = 4
"""Prompts after which the result is written."""


def variants(methods: Sequence[str] = METHODS, budgets: Sequence[int] = BUDGETS) -> list[Variant]:
    """Return every method in every format, the whole fp32 cache first."""
    found = [Variant.of(policy, budget) for budget in budgets for policy in in_every_format(methods)]
    return list(dict.fromkeys(found))


def in_every_format(methods: Sequence[str]) -> list[str]:
    """Return the names under which methods are compared, each in every format."""
    return [name for method in methods for form in CACHE_FORMATS for name in in_format([method], form)]


def in_format(methods: Sequence[str], form: str) -> list[str]:
    """Return the names under which methods are compared in one format."""
    return [method if form == AUTO else f"{method}:kv_cache={form}" for method in methods]


def plain_text() -> str:
    """Return the documentation's topics in the order of their names, without the marks of its markup."""
    topics = pydoc_data.topics.topics
    return re.sub(r"[ \t]+", " ", re.sub(r"[*`|=\-^~]{2,}", "", "\n".join(topics[name] for name in sorted(topics))))


def questions(model: PolicyEngines, length: int, count: int) -> list[Question]:
    """Return `count` pieces of the text, evenly spread, each as a prompt and the tokens that follow it."""
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(plain_text())
    if len(ids) < length:
        raise SystemExit(f"error: the text has {len(ids)} tokens, fewer than {length}")
    step = (len(ids) - length) // max(1, count - 1)
    pieces = (ids[start : start + length] for start in range(0, step * count, step))
    return [Question(tuple(one[:-CONTINUED]), (), target_ids=tuple(one[-CONTINUED:])) for one in pieces]


def measure(model: PolicyEngines, result: Growing, lengths: Sequence[int], count: int, until: float | None) -> None:
    """Add what the result lacks, some prompts of one length at a time."""
    known = {(one["length"], one["prompt"]) for one in result.data["prompts"]}
    with progress_on().task("prompts", count * len(lengths)) as advance:
        for length in lengths:
            asked = questions(model, length, count)
            room = Room(length - CONTINUED, CONTINUED)
            for first in range(0, count, TOGETHER):
                some = range(first, min(first + TOGETHER, count))
                if (length, first) not in known:
                    if until is not None and time.monotonic() >= until:
                        return
                    result.data["prompts"] += _compared(model, asked, some, length, room)
                    result.write()
                advance(len(some))


def _compared(
    model: PolicyEngines, asked: Sequence[Question], some: range, length: int, room: Room
) -> list[dict[str, Any]]:
    """Return one record per prompt: every cache's figures, in the order of `variants`."""
    given = [asked[place] for place in some]
    whole = variants()[0]
    model.announce([whole], room)
    expected = _along(model, whole, room, given)[1]
    found: dict[Variant, list[dict[str, Any]]] = {}
    for form in CACHE_FORMATS:
        together = [one for one in variants() if one.settings.get("kv_cache", AUTO) == form]
        model.announce(together, room)
        for one in together:
            size, logits = _along(model, one, room, given)
            figures = [compare(*pair) for pair in zip(expected, logits, strict=True)]
            found[one] = [{"row_bytes": size, **asdict(each)} for each in figures]
    return [
        {
            "length": length, "prompt": place, "tokens": hashlib.sha256(str(one).encode()).hexdigest()[:12],
            "caches": [found[variant][number] for variant in variants()],
        }
        for number, (place, one) in enumerate(zip(some, given, strict=True))
    ]  # fmt: skip


def _along(
    model: PolicyEngines, variant: Variant, room: Room, asked: Sequence[Question]
) -> tuple[int, list[NDArray[np.float32]]]:
    """Return a row's bytes and the logits along each text."""
    answerer = model.open(variant, room)
    assert isinstance(answerer, SessionAnswerer)
    logits = answerer.along_targets(asked)
    return answerer.row_bytes, logits


def main() -> None:
    """Measure, and write the result as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--checkpoint", help="the model's GGUF file, where the preset does not find it")
    parser.add_argument("--lengths", type=lambda text: [int(one) for one in text.split(",")], default=list(LENGTHS))
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--minutes", type=float, help="begin nothing new after so many")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    arguments = parser.parse_args()
    until = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    asked = {
        "model": arguments.model, "prompts_of_a_length": arguments.prompts,
        "variants": [asdict(one) for one in variants()],
    }  # fmt: skip
    result = Growing.open(NAME, {**asked, "prompts": []}, fresh=arguments.fresh)
    if any(result.data[name] != value for name, value in asked.items()):
        raise SystemExit(f"error: {result.path} has another model or number of prompts; --fresh measures anew")
    with open_model(arguments.model, checkpoint=arguments.checkpoint, progress=progress_on()) as model:
        measure(model, result, arguments.lengths, arguments.prompts, until)
    print(result.path)


if __name__ == "__main__":
    main()
