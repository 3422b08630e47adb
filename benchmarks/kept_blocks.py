"""A GGUF file's own blocks (`--weights keep`) beside the same weights in fp32, int8 and int4: answers, time and bytes.

    python -m benchmarks.kept_blocks              # five minutes

The model is SmolLM2-135M-Instruct, whose file is in Q4_1. The fp32 engine answers some questions; each engine then
follows these answers token by token, and KL says how far its next-token probabilities are from fp32's. A prefill of
2,000 tokens and the steps behind a short prompt take turns over the engines. *narrow* are the same blocks with
inputs in 8 bits, as int8 and int4 have them: no build makes such an engine any more. The result is
benchmarks/results/kept_blocks.json; docs/guide.md has its figures.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

import kvc_trt
from benchmarks import store
from benchmarks.idle import Others
from kvc_trt import Engine
from kvc_trt.runtime.request import Request

NAME = "kept_blocks"
MODEL = "smollm2-135m-instruct"
NARROW = "keep, narrow"
WEIGHTS = ("fp32", "keep", NARROW, "int8", "int4")
QUESTIONS = (
    "What is the capital of France?",
    "Hello!",
    "Write two sentences about rivers.",
    "Name three colours of the rainbow.",
    "Who wrote Hamlet?",
    "Explain photosynthesis to a child.",
    "What is 12 times 12?",
    "Give me a recipe for bread.",
)
ANSWER_TOKENS, PROMPT_TOKENS, SHORT_PROMPT, STEPS = 24, 2000, 64, 64
ROUNDS = 5
Followed = Sequence[tuple[str, Sequence[int]]]
"""Questions with the tokens of their answers."""


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        engines = {weights: _built(weights, Path(directory) / weights) for weights in WEIGHTS}
        rows = _divergences(engines)
        others = Others()
        times = _times(engines)
        counts = {"questions": len(QUESTIONS), "rounds": ROUNDS}
        result: dict[str, Any] = {"model": MODEL, **counts, "others_share": others.share()}
        result["rows"] = [row | times[row["weights"]] for row in rows]
    for row in result["rows"]:
        print(
            f"{row['weights']}: {row['mib']:.0f} MiB, KL {row['kl_mean']:.1e} (most {row['kl_most']:.1e}), prefill "
            f"{row['prefill_s']:.2f} s, step {row['step_ms']:.1f} ms"
        )
    print(store.write_result(NAME, result))


def _built(weights: str, path: Path) -> Engine:
    if weights == NARROW:
        with patch("kvc_trt.graph.layers.KEEP", NARROW):  # no weights are of this kind, so no input is wide
            return _built("keep", path)
    return kvc_trt.build(
        MODEL, policy="full", weights=weights, output=path, verify=False, max_input_len=PROMPT_TOKENS,
        max_output_len=STEPS + 1,
    )  # fmt: skip


def _divergences(engines: dict[str, Engine]) -> list[dict[str, Any]]:
    """Return each engine's divergence from fp32 along fp32's answers, in nats per token, and its bytes."""
    whole = engines["fp32"]
    followed = []
    for question in QUESTIONS:
        answer = whole.generate(whole.chat_prompt(question), max_new_tokens=ANSWER_TOKENS)
        followed.append((question, answer.token_ids))
    expected = _log_probabilities(whole, followed)
    rows = []
    for weights, engine in engines.items():
        nats = (np.exp(expected) * (expected - _log_probabilities(engine, followed))).sum(axis=-1)
        size = sum(file.stat().st_size for file in engine.path.rglob("*") if file.is_file())
        rows.append(
            {
                "weights": weights,
                "mib": size / 2**20,
                "tokens": len(nats),
                "kl_mean": float(nats.mean()),
                "kl_most": float(nats.max()),
            }
        )
    return rows


def _log_probabilities(engine: Engine, followed: Followed) -> NDArray[np.float64]:
    """[tokens, vocabulary] of all answers, each token from a step behind those before it."""
    found = []
    session = engine.session()
    for question, tokens in followed:
        (row,) = session.add([Request(engine.chat_prompt(question), keep_logits=True)])
        for token in tokens:
            found.append(np.asarray(session.take(row).logits, np.float64).reshape(-1))
            session.extend(row, [token])
            session.advance()
        session.remove(row)
    logits = np.asarray(found)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def _times(engines: dict[str, Engine]) -> dict[str, dict[str, Any]]:
    """Median seconds of a prefill and milliseconds of a step, the engines in turns; the first round does not count."""
    prompt = np.random.default_rng(0).integers(100, 40_000, PROMPT_TOKENS).tolist()
    runs: dict[str, list[tuple[float, float]]] = {weights: [] for weights in engines}
    for place in range(ROUNDS + 1):
        for weights, engine in engines.items():
            prefill = _seconds(engine, prompt, 1)
            steps = _seconds(engine, prompt[:SHORT_PROMPT], STEPS + 1) - _seconds(engine, prompt[:SHORT_PROMPT], 1)
            if place:
                runs[weights].append((prefill, 1e3 * steps / STEPS))
    return {
        weights: {
            "prefill_s": median(prefill for prefill, _ in own),
            "step_ms": median(step for _, step in own),
            "runs": own,
        }
        for weights, own in runs.items()
    }


def _seconds(engine: Engine, prompt: list[int], tokens: int) -> float:
    began = time.perf_counter()
    engine.generate(prompt, max_new_tokens=tokens, ignore_eos=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
