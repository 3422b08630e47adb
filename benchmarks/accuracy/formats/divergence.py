"""The divergence of caches in every format from the whole fp32 cache, along plain text without a question.

    python -m benchmarks.accuracy.formats.divergence [--checkpoint FILE.gguf] [--lengths 2048,4096] [--minutes 60]

A prompt is a piece of the Python language's own documentation, which is part of every Python (`pydoc_data.topics`). Its
next 256 tokens are fed one by one to the whole cache and to each other one, and their distributions of the next token
are compared (`kvc_trt.accuracy.faithfulness`): with the whole cache, and with the same method's exact cache, which
shows the effect of the format alone. One prefill serves all caches of all methods. All lengths are asked a few prompts
before any is asked more. Writes benchmarks/results/formats-divergence.json after every few prompts; a run goes on where
the last one of the same commit and machine stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import pydoc_data.topics
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.formats.methods import METHODS, in_every_format
from benchmarks.store import Growing
from kvc_trt.accuracy.faithfulness import compare
from kvc_trt.accuracy.grid import Variant
from kvc_trt.accuracy.questions import Question
from kvc_trt.accuracy.under_test.answerer import SessionAnswerer
from kvc_trt.accuracy.under_test.model_under_test import Room
from kvc_trt.accuracy.under_test.policy_engines import PolicyEngines, open_model
from kvc_trt.policies import BASELINE
from kvc_trt.progress import progress_on

MODEL = "smollm2-135m-instruct"
NAME = "formats-divergence"
LENGTHS = (2048, 4096, 8192)
"""Tokens of prompt and continuation together."""
CONTINUED = 256
PROMPTS = 8
BUDGET = 512
TOGETHER = 4
"""Prompts after which the result is written. Their steps share the reading of weights, where caches have room."""
WHOLE = Variant(BASELINE, None)


class Cache(NamedTuple):
    """A cache along some texts."""

    row_bytes: int
    logits: Sequence[NDArray[np.float32]]
    """One array per text: the logits of its tokens, [N,vocab]."""


def variants(method: str) -> list[Variant]:
    """Return a method in every format, as it is first."""
    return [Variant.of(name, BUDGET) for name in in_every_format([method])]


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
    """Add the results that are missing, some prompts of one length at a time."""
    known = {(one["length"], one["prompt"]) for one in result.data["prompts"]}
    asked = {length: questions(model, length, count) for length in lengths}
    with progress_on().task("prompts", count * len(lengths)) as advance:
        for first, length in product(range(0, count, TOGETHER), lengths):
            some = range(first, min(first + TOGETHER, count))
            if (length, first) not in known:
                if until is not None and time.monotonic() >= until:
                    return
                result.data["prompts"] += _compared(model, asked[length], some, length)
                result.write()
            advance(len(some))


def _compared(model: PolicyEngines, asked: Sequence[Question], some: range, length: int) -> list[dict[str, Any]]:
    """Return one record per method and prompt: the figures of the method's cache in every format."""
    given, room = [asked[place] for place in some], Room(length - CONTINUED, CONTINUED)
    model.announce([one for method in METHODS for one in variants(method)], room)
    whole = _along(model, WHOLE, room, given)
    found = []
    for method in METHODS:
        caches = _in_every_format(model, method, room, given, whole)
        found += [
            {
                "method": method, "length": length, "prompt": place,
                "tokens": hashlib.sha256(str(one).encode()).hexdigest()[:12],
                "caches": [cache[number] for cache in caches],
            }
            for number, (place, one) in enumerate(zip(some, given, strict=True))
        ]  # fmt: skip
    return found


def _in_every_format(
    model: PolicyEngines, method: str, room: Room, given: Sequence[Question], whole: Cache
) -> list[list[dict[str, Any]]]:
    """Return the figures of a method's caches along some texts: a list per format, as it is first."""
    own, *others = variants(method)
    exact = whole if own == WHOLE else _along(model, own, room, given)

    def figures(one: Variant) -> list[dict[str, Any]]:
        return _figures(_along(model, one, room, given), whole, exact)

    with ThreadPoolExecutor(model.workers) as pool:
        return [_figures(exact, whole, exact), *pool.map(figures, others)]


def _figures(cache: Cache, whole: Cache, exact: Cache) -> list[dict[str, Any]]:
    """Compare a cache's logits along some texts with the whole fp32 cache's, and with its method's in fp32."""
    found = []
    for one, of_whole, of_own in zip(cache.logits, whole.logits, exact.logits, strict=True):
        alone = compare(of_own, one)
        figures = {"row_bytes": cache.row_bytes, **asdict(compare(of_whole, one))}
        found.append({**figures, "divergence_from_own": alone.divergence, "equal_to_own": alone.equal})
    return found


def _along(model: PolicyEngines, variant: Variant, room: Room, asked: Sequence[Question]) -> Cache:
    answerer = model.open(variant, room)
    assert isinstance(answerer, SessionAnswerer)
    logits = answerer.along_targets(asked)
    return Cache(answerer.row_bytes, logits)


def main() -> None:
    """Measure, and write the result as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--checkpoint", help="the model's GGUF file, where the preset does not find it")
    parser.add_argument("--lengths", type=lambda text: [int(one) for one in text.split(",")], default=list(LENGTHS))
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--minutes", type=float, help="begin nothing new after this time")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    arguments = parser.parse_args()
    until = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    asked = {
        "model": arguments.model, "prompts_of_a_length": arguments.prompts,
        "variants": {method: [asdict(one) for one in variants(method)] for method in METHODS},
    }  # fmt: skip
    result = Growing.open(NAME, {**asked, "prompts": []}, fresh=arguments.fresh)
    if any(result.data[name] != value for name, value in asked.items()):
        raise SystemExit(f"error: {result.path} has another model or number of prompts; --fresh measures anew")
    with open_model(arguments.model, checkpoint=arguments.checkpoint, threads=1, progress=progress_on()) as model:
        measure(model, result, arguments.lengths, arguments.prompts, until)
    print(result.path)


if __name__ == "__main__":
    main()
