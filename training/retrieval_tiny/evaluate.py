"""Exact match of all four values under greedy decoding: `python -m training.retrieval_tiny.evaluate CHECKPOINT`.

Greedy decoding gives the four right words exactly if each of them is the argmax after its true prefix: as long as the
output is right the prefix is the true one, and at the first wrong word both ways of counting fail the sample. So one
teacher-forced pass over prompt + query + answer scores a sample, and nothing has to be decoded token by token.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from kvc_trt.tasks.kinds.key_value import VALUES_PER_RECORD, KeyValueSample, Placement, generate
from training.retrieval_tiny.checkpoint import load_model
from training.retrieval_tiny.model import SmallLlama

CONTEXTS = (256, 512, 1024, 2048)
PLACEMENTS: tuple[Placement, ...] = ("in_prompt", "after_compaction")
TOKENS_PER_BATCH = 16_384


def exact_match(
    model: SmallLlama,
    *,
    context_tokens: int,
    pairs: int,
    samples: int,
    seed: int,
    placement: Placement = "in_prompt",
) -> float:
    """Share of `samples` questions whose four answer tokens are all right, with the full cache."""
    questions = [
        generate(seed=seed, index=i, context_tokens=context_tokens, pairs=pairs, placement=placement)
        for i in range(samples)
    ]
    rows = max(1, TOKENS_PER_BATCH // context_tokens)
    right = sum(_count_right(model, questions[first : first + rows]) for first in range(0, samples, rows))
    return right / samples


@torch.no_grad()
def _count_right(model: SmallLlama, questions: list[KeyValueSample]) -> int:
    ids = torch.tensor([q.prompt_ids + q.query_ids + q.answer_ids for q in questions])
    positions = torch.arange(ids.shape[1] - VALUES_PER_RECORD - 1, ids.shape[1] - 1)
    predicted = model(ids, positions).argmax(dim=-1)
    return int((predicted == ids[:, positions + 1]).all(dim=1).sum())


def main() -> None:
    """Print the exact match at every context length, with the query in both places."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    model = load_model(arguments.checkpoint)
    print(f"pairs {arguments.pairs}, n {arguments.samples}, seed {arguments.seed}: exact match ± standard error")
    for context_tokens in arguments.contexts:
        for placement in PLACEMENTS:
            rate = exact_match(
                model,
                context_tokens=context_tokens,
                pairs=arguments.pairs,
                samples=arguments.samples,
                seed=arguments.seed,
                placement=placement,
            )
            error = math.sqrt(rate * (1 - rate) / arguments.samples)
            print(f"{context_tokens:5} {placement:16} {rate:.2%} ± {error:.2%}")


if __name__ == "__main__":
    main()
