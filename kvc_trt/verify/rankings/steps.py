"""Compare one step that chooses with the reference on the same inputs: the lists that it read, and its output for them.

If the ranking can prove lists on equal inputs, it judges them. Otherwise the reference runs twice, in float32 and in
float64: a list that equals either result is right, because rounding decides where the two differ, and any other list
is wrong.
"""

from __future__ import annotations

import numpy as np
import torch

from kvc_trt import reference
from kvc_trt.methods.base.isolated_runs import Array, ReadByStep, float32
from kvc_trt.methods.rankings.ranking import Step
from kvc_trt.policies import PolicyParameters
from kvc_trt.reference.softmax import PLAIN, Softmax
from kvc_trt.verify.rankings.array_errors import differences, maximum_error
from kvc_trt.verify.rankings.index_lists import IndexComparison, compare_read


def compare_step(
    read: ReadByStep, parameters: PolicyParameters, *, exact: bool = False, truncates: bool = False
) -> tuple[IndexComparison, float]:
    """Compare a step; return the verdict on its lists, and the error of its output for them.

    `exact` computes the expected output in float64: real queries are larger than random ones, and float32's error grows
    with them on both sides. `truncates` says that tensor cores have summed the products.
    """
    ranking, selection = parameters.selection.ranking(parameters), parameters.selection
    if ranking is None or not ranking.proves_equal_inputs:
        return compare_either(read, parameters)
    q, k, v, m = float32(read.query), float32(read.keys), float32(read.values), torch.from_numpy(read.lengths)
    wanted, expected, *_ = selection.select(q, selection.layer_cache(k, v, m, parameters, read.softmax), parameters)
    assert expected is not None
    step = Step(read.query, read.keys, read.lengths, read.softmax)
    compared = compare_read(ranking, step, expected.numpy(), read.selected, truncates=truncates)
    if exact:
        q, k, v = q.double(), k.double(), v.double()
    if exact or compared.near_ties or compared.wrong:
        wanted = attend_selected(q, k, v, torch.from_numpy(np.ascontiguousarray(read.selected)), read.softmax)
    return compared, maximum_error(read.output, wanted.numpy())


def compare_either(read: ReadByStep, parameters: PolicyParameters) -> tuple[IndexComparison, float]:
    """Compare a step, with a list per KV head or per query head, with the reference in float32 and in float64."""
    single, double = (_select(read, parameters, dtype) for dtype in (np.float32, np.float64))
    found, error = IndexComparison(), 0.0
    scale = max(1.0, float(np.abs(double.output.numpy()).max(initial=0.0)))
    for row in range(len(read.lengths)):
        judged, expected = _judge_row(row, read.selected[row], single, double)
        found += judged
        error = float(np.maximum(error, differences(read.output[row], expected).max() / scale))
    return found, error


def _judge_row(
    row: int, lists: Array, single: reference.Selection, double: reference.Selection
) -> tuple[IndexComparison, Array]:
    """Return the verdict on one row's lists, and the expected output [H,D] for them.

    The expected output for a list is that of the run whose list it equals; of the float64 run if it equals both."""
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


def _select(read: ReadByStep, parameters: PolicyParameters, dtype: type) -> reference.Selection:
    tables = (read.query, read.keys, read.values)
    q, k, v = (torch.from_numpy(np.ascontiguousarray(array, dtype)) for array in tables)
    lengths = torch.from_numpy(np.ascontiguousarray(read.lengths))
    cache = parameters.selection.layer_cache(k, v, lengths, parameters, read.softmax)
    return parameters.selection.select(q, cache, parameters)


def _as_wide(lists: Array, width: int) -> Array:
    """Return lists [L,k] padded to [L,width] with -1."""
    return np.pad(lists, ((0, 0), (0, width - lists.shape[1])), constant_values=-1)


def attend_selected(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, selected: torch.Tensor, softmax: Softmax = PLAIN
) -> torch.Tensor:
    """Exact attention over given tokens: query [B,H,D], caches [B,G,C,D], selected [B,G,k] (-1 for none) -> [B,H,D]."""
    batch, groups = keys.shape[:2]
    grouped = query.reshape(batch, groups, -1, query.shape[-1])
    output, heads = torch.empty_like(grouped), grouped.shape[2]
    for row in range(batch):
        for head in range(groups):
            index = selected[row, head][selected[row, head] >= 0].long().clamp(max=keys.shape[2] - 1)
            output[row, head] = reference.dense_attention(
                grouped[None, row, head],
                keys[None, row, head, None, index].reshape(1, 1, -1, keys.shape[-1]),
                values[None, row, head, None, index].reshape(1, 1, -1, keys.shape[-1]),
                torch.tensor([len(index)]),
                softmax=softmax.of_heads(range(head * heads, (head + 1) * heads)),
            )[0]
    return output.reshape(query.shape)
