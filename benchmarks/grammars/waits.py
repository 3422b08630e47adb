"""The time that a token waits for its grammar, with the mask computed beside the model's step, at 128 thousand words.

    python -m benchmarks.grammars.waits                            # benchmarks/results/grammar_waits.json; five minutes
    python -m benchmarks.grammars.waits --tokenizer tokenizer.json # of another tokenizer

The step is the last product of a small model with such a vocabulary, [1, 256] by [256, 128000] in float32, by ONNX
Runtime: a whole step takes longer, and hides more. A token waits for the mask after the step, and for the answer's
state to take the token in. `beside` is as a session does it: the mask of the next token is computed on another thread
while the step runs (`runtime/session/steps.py`). `after` is the mask computed when the step is over. With one thread
for the step a core is left for the mask; with all cores in use, none is free. By how much a mask makes the step longer
is not measured: it is less than the step's own time varies by. It is wall time, and each figure of a token is the least
of five answers, since other processes only add to it. Bar: under 1 ms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from benchmarks import machine, store
from benchmarks.grammars.masks import BAR_MS, CASES, END, trained
from kvc_trt.models.sources.tokenizer_library import Tokenizer
from kvc_trt.runtime.grammar.compiler import Grammars
from kvc_trt.runtime.grammar.grammar import Grammar
from kvc_trt.runtime.grammar.matcher import Matcher

HIDDEN = 256
MOST_TOKENS, ANSWERS = 30, 5
"""The most tokens in the text of a case and in its even draws, and the number of times that each is answered."""


class Waited(NamedTuple):
    """One token, in milliseconds of wall time."""

    step: float
    wait: float


def step_of(words: int, threads: int) -> Callable[[], Any]:
    """Return a model's last product, on `threads` threads."""
    weights = np.random.default_rng(0).standard_normal((HIDDEN, words), np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["hidden", "weights"], ["logits"])],
        "step",
        [helper.make_tensor_value_info("hidden", TensorProto.FLOAT, [1, HIDDEN])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, words])],
        [numpy_helper.from_array(weights, "weights")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(onnx.ModelProto.SerializeToString(model), options)
    given = {"hidden": np.ones((1, HIDDEN), np.float32)}
    return lambda: session.run(None, given)


def drawn(matcher: Matcher, seed: int, most: int) -> list[int]:
    """Return the tokens of an answer of even draws."""
    generator, tokens = np.random.default_rng(seed), list[int]()
    while len(tokens) < most and not matcher.is_complete:
        token = int(generator.choice(np.flatnonzero(matcher.allowed())))
        if token == END:
            break
        tokens.append(token)
        matcher.advance(token)
    return tokens


def answers_of(grammars: Grammars, tokenizer: Tokenizer, name: str) -> dict[str, list[list[int]]]:
    """Return answers to replay: the part of a case's text that its grammar allows, and uniform draws."""
    grammar, text = CASES[name]
    whole = tokenizer.encode(text, add_special_tokens=False).ids[:MOST_TOKENS]
    answers, left = [], MOST_TOKENS
    for seed in range(ANSWERS):
        answers.append(drawn(grammars.matcher(grammar, [END], name), seed, left))
        left -= len(answers[-1])
    possible = grammars.matcher(grammar, [END], name).prefix(whole)
    return {"text": [whole[:possible]], "drawn": answers}


def replayed(matcher: Matcher, tokens: Sequence[int], step: Callable[[], Any], beside: bool) -> list[Waited]:
    """Let a new answer be these tokens."""
    found, clock = [], time.perf_counter
    for token in tokens:
        begun = clock()
        if beside:
            matcher.prepare()
        step()
        stepped = clock()
        allowed = matcher.allowed()
        masked = clock()
        assert allowed[token]
        before = clock()
        matcher.advance(token)
        found.append(Waited(1000 * (stepped - begun), 1000 * (masked - stepped + clock() - before)))
    return found


def measured(grammars: Grammars, tokenizer: Tokenizer, threads: int) -> list[dict[str, Any]]:
    """Return the figures of each case, with a step on `threads` threads."""
    step = step_of(max(tokenizer.get_vocab().values()) + 1, threads)
    for _ in range(20):
        step()
    cases = []
    for name, (grammar, _) in CASES.items():
        for kind, answers in answers_of(grammars, tokenizer, name).items():
            runs: dict[bool, list[list[Waited]]] = {False: [], True: []}
            for _ in range(ANSWERS):
                for beside, found in runs.items():
                    found.append([
                        one
                        for tokens in answers
                        for one in replayed(grammars.matcher(grammar, [END], name), tokens, step, beside)
                    ])  # fmt: skip
            cases.append({"grammar": name, "answer": kind, "threads": threads, **summary(runs[False], runs[True])})
            print(line(cases[-1]), flush=True)
    return cases


def summary(after: Sequence[Sequence[Waited]], beside: Sequence[Sequence[Waited]]) -> dict[str, Any]:
    """Figures over tokens, of which each is the least of all answers."""
    alone = statistics.median(min(one.step for one in token) for token in zip(*after, strict=True))
    figures = {
        "after": [min(one.wait for one in token) for token in zip(*after, strict=True)],
        "beside": [min(one.wait for one in token) for token in zip(*beside, strict=True)],
    }
    return {
        "tokens": len(figures["after"]),
        "step_ms": round(alone, 3),
        **{
            f"{name}_{word}_ms": round(float(value), 3)
            for name, values in figures.items()
            for word, value in (
                ("median", np.median(values)),
                ("p99", np.quantile(values, 0.99)),
                ("worst", max(values)),
            )
        },
    }


def line(case: dict[str, Any]) -> str:
    pairs = (
        f"{name} {case[f'{name}_median_ms']:.3f}, p99 {case[f'{name}_p99_ms']:.3f}" for name in ("after", "beside")
    )
    return (
        f"{case['grammar']:22} {case['answer']:5} of {case['tokens']:3}, step {case['step_ms']:.1f} ms on "
        f"{case['threads']} | {' | '.join(pairs)} ms"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json, instead of one that is trained")
    options = parser.parse_args(arguments)
    record = machine.record()
    content = trained() if options.tokenizer is None else options.tokenizer.read_bytes()
    tokenizer = Tokenizer(content, "the tokenizer")
    grammars = Grammars(tokenizer, max(tokenizer.get_vocab().values()) + 1)
    grammars.check(Grammar.regex("a+"), "the first grammar")
    cores = len(os.sched_getaffinity(0))
    cases = [case for threads in sorted({1, cores}) for case in measured(grammars, tokenizer, threads)]
    store.write_result("grammar_waits", {"machine": record, "bar_ms": BAR_MS, "cases": cases})
    return 0


if __name__ == "__main__":
    sys.exit(main())
