"""Training batches: a haystack, then many queries with their answers, so that one sequence gives many targets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvc_trt.tasks.kinds.key_value import END, QUERY, VALUES_PER_RECORD, Ids, draw_haystack
from kvc_trt.tasks.task import sample_rng

TARGETS_PER_QUERY = VALUES_PER_RECORD + 1  # the four values, then <end>
QUESTION_TOKENS = 2 + TARGETS_PER_QUERY  # <query> key v1 v2 v3 v4 <end>


@dataclass(frozen=True)
class BatchShape:
    """`context` counts the haystack; every batch draws its number of pairs from an inclusive range."""

    context: int
    pairs: tuple[int, int]
    queries: int
    rows: int


@dataclass(frozen=True)
class Batch:
    """ids [B, n]; positions [T] after which the next token is a target, the same in every row; targets [B, T]."""

    ids: Tensor
    positions: Tensor
    targets: Tensor


def draw_batch(shape: BatchShape, seed: int, step: int) -> Batch:
    """The batch of one step; it depends on nothing but the arguments."""
    rng = sample_rng("retrieval-tiny training", seed, step)
    fewest, most = shape.pairs
    pairs = int(rng.integers(fewest, most + 1))
    queries = min(shape.queries, pairs)
    ids = torch.from_numpy(np.stack([_draw_row(rng, shape.context, pairs, queries) for _ in range(shape.rows)]))

    first_key = shape.context + 1
    keys = torch.arange(first_key, ids.shape[1], QUESTION_TOKENS)
    positions = (keys[:, None] + torch.arange(TARGETS_PER_QUERY)).flatten()
    return Batch(ids, positions, ids[:, positions + 1])


def _draw_row(rng: np.random.Generator, context: int, pairs: int, queries: int) -> Ids:
    """One sequence; no key is asked twice, so that no answer can be copied from an earlier answer."""
    haystack, keys, values = draw_haystack(rng, context, pairs)
    asked = rng.permutation(pairs)[:queries]
    start, end = np.full(queries, QUERY), np.full(queries, END)
    questions = np.column_stack([start, keys[asked], values[asked], end])
    return np.concatenate([haystack, questions.ravel()])
