"""Training batches: contexts, each followed by many questions that see the context and nothing of one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvc_trt.tasks.kinds.key_value import END, PAD
from kvc_trt.tasks.task import sample_rng
from training.retrieval_text.contexts import Ids, Kind, Texts, lines_row, needles_row
from training.retrieval_tiny.branches import Branches

IGNORED = -100  # what torch's cross-entropy leaves out
BRANCH_TOKENS: dict[Kind, int] = {"single": 21, "values": 57, "queries": 57, "line": 20}  # of question and answer
LINES_SHARE = 0.2  # of the batches


@dataclass(frozen=True)
class BatchShape:
    """`context` counts the tokens before the questions; the last three are how many are asked of each row."""

    context: int
    rows: int
    single: int
    values: int
    queries: int


@dataclass(frozen=True)
class Batch:
    """ids [B, n]; targets [B, T], what is to follow the answers of `branches`, or IGNORED."""

    ids: Tensor
    branches: Branches
    targets: Tensor


def draw_batch(texts: Texts, shape: BatchShape, seed: int, step: int) -> Batch:
    """The batch of one step; it depends on nothing but the arguments."""
    rng = sample_rng("retrieval-text training", seed, step)
    asked: dict[Kind, int]
    if rng.random() < LINES_SHARE:
        asked = {"line": shape.single + 2 * (shape.values + shape.queries)}
        rows = [lines_row(texts, rng, shape.context, asked["line"]) for _ in range(shape.rows)]
    else:
        asked = {"single": shape.single, "values": shape.values, "queries": shape.queries}
        rows = [needles_row(texts, rng, shape.context, asked) for _ in range(shape.rows)]
    ids, targets = [], []
    for row in rows:
        branches = [_branches(texts, row.asked[kind], BRANCH_TOKENS[kind], count) for kind, count in asked.items()]
        ids.append(row.context + [i for some, _ in branches for i in some])
        targets.append([IGNORED] * shape.context + [i for _, some in branches for i in some])
    lengths = [BRANCH_TOKENS[kind] for kind, count in asked.items() for _ in range(count)]
    wanted = torch.tensor(targets)
    answers = (wanted != IGNORED).any(dim=0).nonzero().squeeze(1)
    return Batch(torch.tensor(ids), Branches.of(shape.context, lengths, answers), wanted[:, answers])


def _branches(texts: Texts, asked: Sequence[tuple[str, str]], length: int, count: int) -> tuple[Ids, Ids]:
    """Ids and targets of `count` branches of `length` tokens; those that nothing is asked in are padding."""
    questions, answers = (texts.ids(some) for some in zip(*asked, strict=True)) if asked else ([], [])
    ids: Ids = []
    targets: Ids = []
    for question, answer in zip(questions, answers, strict=True):
        padding = length - len(question) - len(answer)
        ids += question + answer + [PAD] * padding
        targets += [IGNORED] * (len(question) - 1) + answer + [END] + [IGNORED] * padding
    missing = (count - len(questions)) * length
    return ids + [PAD] * missing, targets + [IGNORED] * missing
