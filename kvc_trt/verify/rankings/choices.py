"""Choices of a method that is judged by equality on equal inputs: the reference runs twice, in float32 and float64.

A list that equals either of the two is right: where they differ, rounding decides. One that equals neither is wrong,
unless what it ranks are softmax weights, and underflow explains it (`underflow`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvc_trt import reference
from kvc_trt.methods.base.isolated_runs import ExactList
from kvc_trt.policies import PolicyParameters
from kvc_trt.verify.rankings.near_ties import Difference, IndexComparison, compare_lists
from kvc_trt.verify.rankings.outcome import differences
from kvc_trt.verify.rankings.underflow import unexplained

Array = NDArray[Any]


def compare_either(
    query: Array, keys: Array, values: Array, lengths: Array, output: Array, selected: Array,
    parameters: PolicyParameters,
) -> tuple[IndexComparison, float]:  # fmt: skip
    """As `ops.compare_step`; `selected` may hold a list per KV head or per query head."""
    single, double = (_select(query, keys, values, lengths, parameters, dtype) for dtype in (np.float32, np.float64))
    found, error = IndexComparison(), 0.0
    scale = max(1.0, float(np.abs(double.output.numpy()).max(initial=0.0)))
    for row in range(len(lengths)):
        judged, expected = _judge_row(row, selected[row], single, double)
        found += judged
        error = float(np.maximum(error, differences(output[row], expected).max() / scale))
    return found, error


def _judge_row(
    row: int, lists: Array, single: reference.Selection, double: reference.Selection
) -> tuple[IndexComparison, Array]:
    """What became of one row's lists, and the output [H,D] that is then right: of each list that of the run it equals,
    in double precision where it equals both."""
    chosen = [run.selected for run in (double, single) if run.selected is not None]
    width = max(lists.shape[-1], *(tensor.shape[-1] for tensor in chosen))
    lists, *expected = (_as_wide(table, width) for table in (lists, *(tensor[row].numpy() for tensor in chosen)))
    equal = [(lists == one).all(axis=-1) for one in expected]
    right = equal[0] | equal[1]
    wrong = tuple(
        f"row {row}, list {place}: {np.setdiff1d(lists[place], expected[0][place])[:4].tolist()} were read, not "
        f"{np.setdiff1d(expected[0][place], lists[place])[:4].tolist()}"
        for place in np.flatnonzero(~right)
    )
    swapped = int((right & ~equal[1]).sum())
    in_double = np.repeat(equal[0], len(double.output[row]) // len(lists))[:, None]
    output = np.where(in_double, double.output[row].numpy(), single.output[row].numpy())
    return IndexComparison(len(lists), near_ties=swapped, swapped_tokens=swapped, wrong=wrong), output


def _select(
    query: Array, keys: Array, values: Array, lengths: Array, parameters: PolicyParameters, dtype: type
) -> reference.Selection:
    q, k, v = (torch.from_numpy(np.ascontiguousarray(array, dtype)) for array in (query, keys, values))
    cache = parameters.selection.layer_cache(k, v, torch.from_numpy(np.ascontiguousarray(lengths)), parameters)
    return parameters.selection.select(q, cache, parameters)


def compare_exactly(choice: ExactList) -> IndexComparison:
    """Lists of one row that must be the same to the last entry as one of those expected, or differ by underflow."""

    def explain(row: int, head: int, difference: Difference) -> str | None:
        return "it is another" if choice.ranked is None else unexplained(choice.ranked, choice.found, head, difference)

    every = [compare_lists(one[None], choice.found[None], explain) for one in choice.expected]
    compared = min(every, key=lambda found: (len(found.wrong), found.near_ties))
    if not compared.wrong:
        return compared
    wrong = f"row {choice.row}: {len(compared.wrong)} lists of kept tokens differ ({compared.wrong[0]})"
    return IndexComparison(compared.compared, wrong=(wrong,))


def _as_wide(lists: Array, width: int) -> Array:
    """`lists` [L,k] as [L,width], -1 past the end."""
    return np.pad(lists, ((0, 0), (0, width - lists.shape[1])), constant_values=-1)
