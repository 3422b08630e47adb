"""The cost of a grammar per token: the mask over the logits and the step of the answer's state, at 128 thousand words.

    python -m benchmarks.grammars.masks                             # benchmarks/results/grammars.json; two minutes
    python -m benchmarks.grammars.masks --tokenizer tokenizer.json  # of another tokenizer
    python -m benchmarks.grammars.masks --library-slices            # grammars_library_slices.json: without our slices

The answers are texts that each grammar allows, as the tokenizer writes them, and then even draws among the allowed
tokens, which visit states that no model would. A token's time has all that `runtime/grammar/matcher.py` does: the mask
as booleans, and the step. It is processor time of its thread, so that other processes count as little as can be. Bar:
a median under 1 ms. What the first grammar takes once for an engine is measured in a process of its own, since memory
that training gave back would hide it.

Without a tokenizer, one is trained: byte-level BPE, on the files of Python packages that are installed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import machine, store
from kvc_trt.models.sources.tokenizer_library import Tokenizer
from kvc_trt.runtime.grammar import compiler
from kvc_trt.runtime.grammar.compiler import Grammars
from kvc_trt.runtime.grammar.grammar import Grammar
from kvc_trt.runtime.grammar.matcher import Matcher

WORDS = 128_000
BAR_MS = 1.0
TRAINED_ON = 60 << 20
"""Characters."""
END = 0
DRAWN = 300
"""Tokens of a drawn answer, at most."""
ANSWERS = 5
"""Answers of each kind."""

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["new", "known", "lost"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
    "additionalProperties": False,
}
ALICE = {
    "name": "Alice of the long and winding road",
    "age": 34,
    "email": "alice@example.org",
    "tags": ["new", "known"],
    "address": {"street": "Hauptstraße 5, third floor on the left", "city": "Zürich"},
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"value": {"type": "number"}, "parts": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["value", "parts"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
MANY = {
    "type": "object",
    "properties": {f"field_{n}": {"type": ["string", "null"], "maxLength": 40} for n in range(60)},
    "additionalProperties": False,
}
CHOICES = [f"{kind} number {n}" for kind in ("article", "order", "customer") for n in range(700)]
CASES: dict[str, tuple[Grammar, str]] = {
    "any JSON object": (Grammar.json_object(), json.dumps({"people": [ALICE] * 3, "count": 3}, indent=2)),
    "a person": (Grammar.json_schema(PERSON), json.dumps(ALICE, ensure_ascii=False)),
    "a tree": (
        Grammar.json_schema(TREE),
        json.dumps({"value": 1, "parts": [{"value": n / 4, "parts": []} for n in range(40)]}),
    ),
    "60 optional fields": (
        Grammar.json_schema(MANY),
        json.dumps({f"field_{n}": f"the text of field {n}" for n in range(0, 60, 2)}),
    ),
    "2,100 choices": (Grammar.choice(CHOICES), "customer number 512"),
    "a regular expression": (
        Grammar.regex(r"([A-Z][a-z]+ ){2,20}on [0-9]{4}-[0-9]{2}-[0-9]{2} at [0-9]{2}:[0-9]{2}"),
        "Many Words Of This Kind And Others Come Before The End on 2026-03-04 at 12:30",
    ),
}


def texts() -> Iterator[str]:
    """Files of installed packages, `TRAINED_ON` characters in all."""
    files = [path for path in Path(sysconfig.get_path("purelib")).rglob("*") if path.suffix in (".py", ".md", ".rst")]
    left = TRAINED_ON
    for path in sorted(files, key=lambda path: random.Random(str(path)).random()):
        text = path.read_text(encoding="utf-8", errors="ignore")[:200_000]
        left -= len(text)
        yield text
        if left < 0:
            return


def trained() -> bytes:
    """Return the tokenizer.json of a byte-level tokenizer of `WORDS` words, as chat models have it."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(texts(), trainer)
    return library.to_str().encode()


def written(matcher: Matcher, tokens: Sequence[int]) -> Iterator[float]:
    """Let the answer be these tokens; yield the processor time of each, in milliseconds."""
    matcher.begin_answer()
    for token in tokens:
        start = time.thread_time()
        allowed = matcher.allowed()
        masked = time.thread_time() - start
        if not allowed[token]:  # where a text is forced, its own tokens alone are
            return
        start = time.thread_time()
        matcher.advance(token)
        yield 1000 * (masked + time.thread_time() - start)


def drawn(matcher: Matcher, seed: int) -> Iterator[float]:
    """Let the answer be an even draw; yield the processor time of each of its tokens, in ms."""
    matcher.begin_answer()
    generator = np.random.default_rng(seed)
    for _ in range(DRAWN):
        start = time.thread_time()
        allowed = matcher.allowed()
        masked = time.thread_time() - start
        token = int(generator.choice(np.flatnonzero(allowed)))
        if token == END:
            return
        start = time.thread_time()
        matcher.advance(token)
        yield 1000 * (masked + time.thread_time() - start)
        if matcher.is_complete:
            return


def take_library_slices() -> None:
    """Divide the vocabulary as the library does by default."""
    from llguidance import LLTokenizer

    compiler._SLICES = LLTokenizer.general_slices()


def of_vocabulary(content: bytes, library_slices: bool) -> dict[str, Any]:
    """Words of a tokenizer.json, and what this process spends on its first grammar: processor seconds and memory."""
    if library_slices:
        take_library_slices()
    tokenizer = Tokenizer(content, "the tokenizer")
    size = max(tokenizer.get_vocab().values()) + 1
    grammars, process = Grammars(tokenizer, size), psutil.Process()
    before, start = process.memory_info().rss, time.process_time()
    grammars.check(Grammar.regex("a+"), "the first grammar")
    seconds, held = time.process_time() - start, process.memory_info().rss - before
    return {"words": size, "vocabulary_seconds": round(seconds, 3), "vocabulary_mib": round(held / 2**20, 1)}


def measured(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the figures of each case. Grammars are compiled on a thread of their own."""
    grammars = Grammars(tokenizer, max(tokenizer.get_vocab().values()) + 1)
    grammars.check(Grammar.regex("a+"), "the first grammar")
    cases = []
    for name, (grammar, text) in CASES.items():
        start = time.process_time()
        grammars.check(grammar, name)
        compiled = 1000 * (time.process_time() - start)
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        matcher = grammars.matcher(grammar, [END], name)
        of_text = [one for _ in range(ANSWERS) for one in written(matcher, tokens)]
        of_draws = [one for seed in range(ANSWERS) for one in drawn(grammars.matcher(grammar, [END], name), seed)]
        cases.append({
            "grammar": name,
            "compile_ms": round(compiled, 1),
            **summary("text", of_text),
            **summary("drawn", of_draws),
        })  # fmt: skip
    return cases


def summary(name: str, times: Sequence[float]) -> dict[str, Any]:
    return {
        f"{name}_tokens": len(times),
        f"{name}_median_ms": round(statistics.median(times), 3),
        f"{name}_p99_ms": round(float(np.quantile(times, 0.99)), 3),
        f"{name}_worst_ms": round(max(times), 3),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json, instead of one that is trained")
    parser.add_argument("--library-slices", action="store_true", help="divide the vocabulary as llguidance does")
    options = parser.parse_args(arguments)
    record = machine.record()
    content = trained() if options.tokenizer is None else options.tokenizer.read_bytes()
    with multiprocessing.get_context("spawn").Pool(1) as other:
        vocabulary = other.apply(of_vocabulary, (content, options.library_slices))
    if options.library_slices:
        take_library_slices()
    cases = measured(Tokenizer(content, "the tokenizer"))
    name = "grammars_library_slices" if options.library_slices else "grammars"
    store.write_result(name, {"machine": record, "bar_ms": BAR_MS, "vocabulary": vocabulary, "cases": cases})
    words, seconds, held = (vocabulary[key] for key in ("words", "vocabulary_seconds", "vocabulary_mib"))
    print(f"{words} words: {seconds} s and {held} MiB once")
    for case in cases:
        print(
            f"{case['grammar']:22} compile {case['compile_ms']:7.1f} ms | text: median {case['text_median_ms']:.3f}, "
            f"p99 {case['text_p99_ms']:.3f} ms of {case['text_tokens']} | drawn: median {case['drawn_median_ms']:.3f}, "
            f"p99 {case['drawn_p99_ms']:.3f}, worst {case['drawn_worst_ms']:.3f} ms of {case['drawn_tokens']}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
