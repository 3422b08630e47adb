"""Accuracy under every policy, measured on engines: `python -m training.retrieval_tiny.score_policies`.

Each policy is built from the shipped checkpoint and asked the questions of `evaluate`; prints the model card's table.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from kvc_trt.backends.opening import open_session
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.verify.questions.question import Accuracy
from kvc_trt.verify.questions.wordings import KeyValueWording
from kvc_trt.verify.rungs.retrieval import answers
from training.retrieval_tiny.evaluate import CONTEXTS, PLACEMENTS

POLICIES = (
    ("full", None),
    ("rocketkv", 64),
    ("rocketkv", 128),
    ("rocketkv", 256),
    ("hybrid", 64),
    ("hybrid", 128),
    ("snapkv++", 64),
    ("snapkv++", 128),
    ("snapkv-gqa", 128),
    ("snapkv-gqa", 256),
)
ROWS = 8


def build(directory: Path, policy: str, token_budget: int | None) -> Path:
    """An engine of the shipped model in `directory`."""
    engine = directory / f"{policy}-{token_budget}"
    budget = [] if token_budget is None else ["--token-budget", str(token_budget)]
    command = ["build", "--model", "retrieval-tiny", "--policy", policy, *budget, "--no-verify", "-o", str(engine)]
    subprocess.run([sys.executable, "-m", "kvc_trt", *command], check=True, stderr=subprocess.DEVNULL)
    return engine


def accuracies(engine: Path, *, samples: int, seed: int) -> list[Accuracy]:
    """Greedy exact match per placement and context, placements outermost."""
    session = open_session(engine, RunOptions(threads=1), max_batch_size=ROWS)
    found = []
    for placement in PLACEMENTS:
        for context in CONTEXTS:
            asked = KeyValueWording().ask(context=context, placement=placement, samples=samples, seed=seed)
            found.append(asked.accuracy(answers(session, asked)))
    return found


def main() -> None:
    """Print one row per policy as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    contexts = " | ".join(map(str, CONTEXTS))
    print(f"| policy | token budget | in the prompt: {contexts} | after compaction: {contexts} |")
    print("|---" * (2 + len(PLACEMENTS) * len(CONTEXTS)) + "|")
    with tempfile.TemporaryDirectory() as directory:
        for policy, token_budget in POLICIES:
            engine = build(Path(directory), policy, token_budget)
            cells = accuracies(engine, samples=arguments.samples, seed=arguments.seed)
            row = " | ".join(f"{100 * a.rate:.1f} ± {100 * a.standard_error:.1f}" for a in cells)
            print(f"| `{policy}` | {token_budget or '-'} | {row} |", flush=True)


if __name__ == "__main__":
    main()
