"""Choices that have no proof of near-ties: a choice is right if the reference makes it in float32 or in float64."""

from __future__ import annotations

import numpy as np
import torch

from kvc_trt import reference
from kvc_trt.methods.base.isolated_runs import ReadByStep
from kvc_trt.verify.rankings import steps

LISTS = [[0, 1], [2, 3]]
OTHERS = [[0, 4], [2, 4]]


def compared(lists, output, monkeypatch):
    """Two KV heads of two query heads each: float32 reads LISTS and answers 1, float64 reads OTHERS and answers 2."""

    def select(read, parameters, dtype):
        single = dtype is np.float32
        selected = torch.tensor([LISTS if single else OTHERS], dtype=torch.int32)
        return reference.Selection(torch.full((1, 4, 3), 1.0 if single else 2.0), selected)

    monkeypatch.setattr(steps, "_select", select)
    given = np.array([output], np.float32)[..., None].repeat(3, axis=2)
    return steps.compare_either(ReadByStep(None, None, None, np.array([5]), given, np.array([lists])), None)


def test_each_list_is_judged_by_the_run_that_it_equals(monkeypatch):
    """Rounding may decide for one KV head and not for the other; outputs are those of the lists."""
    found, error = compared([LISTS[0], OTHERS[1]], [1, 1, 2, 2], monkeypatch)
    assert (found.compared, found.near_ties, found.wrong, error) == (2, 1, (), 0.0)
    assert compared([LISTS[0], OTHERS[1]], [1, 1, 1, 1], monkeypatch)[1] > 0.4


def test_a_list_that_neither_run_makes_is_wrong(monkeypatch):
    found, _ = compared([LISTS[0], [3, 4]], [1, 1, 2, 2], monkeypatch)
    assert found.wrong == ("row 0, list 1: [3] were read, not [2]",)
