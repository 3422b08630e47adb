"""Cells as a measurement leaves them, without measuring anything."""

from __future__ import annotations

from kvc_trt.accuracy.cell import Cell
from kvc_trt.accuracy.pages.report import AccuracyReport

SAMPLES = 20
SETTINGS = {"model": "m<o>del", "weights": "fp32", "backend": "onnxruntime", "samples": SAMPLES, "seed": 0}


def cell(policy="rocketkv", token_budget=64, right=SAMPLES, *, full=1.0, task="niah-single-1", mode="query-aware",
         length=512, reason="") -> Cell:  # fmt: skip
    """`right` of 20 questions answered; depths from 0 to 1."""
    scores = () if reason else tuple(float(i < right) for i in range(SAMPLES))
    right_of_full = tuple(float(i < full * SAMPLES) for i in range(SAMPLES))
    depths = () if reason else tuple(i / (SAMPLES - 1) for i in range(SAMPLES))
    return Cell(
        task=task, family="needles", mode=mode, length=length, policy=policy,
        token_budget=None if policy == "full" else token_budget, seed=0, dataset="d" * 64, max_new_tokens=8,
        full_scores=right_of_full, scores=scores, depths=depths, executor="onnxruntime", row_bytes=1024, reason=reason,
    )  # fmt: skip


def grid() -> list[Cell]:
    """Two lengths, two modes; hybrid loses at the lower budget, snapkv does not apply there; lines are not learned."""
    cells = []
    for mode in ("query-aware", "query-agnostic"):
        for length in (512, 1024):
            where = {"mode": mode, "length": length}
            cells += [
                cell("full", **where),
                *(cell("rocketkv", budget, 20, **where) for budget in (64, 128)),
                cell("hybrid", 64, 8, **where),
                cell("hybrid", 128, 20, **where),
                cell("snapkv", 64, reason="the prompt budget is <13> tokens", **where),
                cell("snapkv", 128, 15, **where),
                cell("full", right=10, full=0.5, task="lines", **where),
                cell("rocketkv", 64, 9, full=0.5, task="lines", **where),
            ]
    return cells


def report(**changes) -> AccuracyReport:
    return AccuracyReport(**{"settings": SETTINGS, "machine": {}, "cells": grid(), **changes})
