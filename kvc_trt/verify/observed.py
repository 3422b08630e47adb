"""The engine at work, observed: what each compression operator was given and what it chose, layer by layer.

An operator is compared with the reference on the inputs that it really got, so that rounding of earlier layers cannot
pass for an error of selection, nor hide one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvc_trt import policies
from kvc_trt.verify.engine_run import EngineRun, run
from kvc_trt.verify.near_ties import IndexComparison, compare_compaction
from kvc_trt.verify.ops import compare_step, larger
from kvc_trt.verify.prompts import Batch
from kvc_trt.verify.target import ObservedExecutor, Target, Watched

if TYPE_CHECKING:
    from kvc_trt.engine import Engine

Array = NDArray[Any]


@dataclass
class Observed:
    """Comparisons and measurements over every compressed layer and step."""

    compaction: IndexComparison = field(default_factory=IndexComparison)
    selection: IndexComparison = field(default_factory=IndexComparison)
    output_error: float = 0.0
    choices: dict[int, list[Array]] = field(default_factory=dict)
    """Per layer: positions kept [B,G,C], then slots read by each step [B,G,k]."""
    lengths: list[Array] = field(default_factory=list)
    """Stored lengths [caches,B] after each step's append."""
    run: EngineRun | None = None


def observe(
    engine: Engine, target: Target, batch: Batch, steps: int, *, tokens: NDArray[np.int64] | None = None
) -> Observed:
    """Run `batch` and `steps` steps with every KvcCompact and KvcHybridAttention exposed."""
    compactions, selections = target.compactions(), target.selections()
    exposed = {name for op in (*compactions, *selections) for name in (*op.inputs, *op.outputs)}
    executor = target.open(expose=sorted(exposed))
    found = Observed()

    def after_prefill(prefilled: Any) -> None:
        for op in compactions:
            found.compaction += _compare_compaction(engine, executor, op, batch)
            found.choices[op.layer] = [executor.exposed(op.outputs[-1]).copy()]

    def after_step(step: int, lengths: NDArray[np.int64]) -> None:
        found.lengths.append(lengths.copy())
        for op in selections:
            compared, error = _compare_selection(engine, executor, op, lengths[op.layer])
            found.selection += compared
            found.output_error = larger(found.output_error, error)
            found.choices[op.layer].append(executor.exposed(op.outputs[-1]).copy())

    found.run = run(executor, batch, steps, tokens=tokens, after_prefill=after_prefill, after_step=after_step)
    return found


def _compare_compaction(engine: Engine, executor: ObservedExecutor, op: Watched, batch: Batch) -> IndexComparison:
    q_window, keys, values = map(executor.exposed, op.inputs)
    if (width := q_window.shape[2]) != engine.parameters.window:
        return IndexComparison(1, wrong=(f"layer {op.layer}: a window of {width}, not {engine.parameters.window}",))
    q, k, v = (torch.from_numpy(np.ascontiguousarray(array, np.float32)) for array in (q_window, keys, values))
    lengths = torch.from_numpy(batch.prompt_lengths)
    expected = policies.method(engine.parameters).compact(q, k, v, lengths, engine.parameters)
    kernel = engine.parameters.pool_kernel
    actual = executor.exposed(op.outputs[-1])
    return compare_compaction(
        q_window, keys, batch.prompt_lengths, expected.indices.numpy(), actual, pool_kernel=kernel
    )


def _compare_selection(
    engine: Engine, executor: ObservedExecutor, op: Watched, lengths: NDArray[np.int64]
) -> tuple[IndexComparison, float]:
    rows = len(lengths)
    keys, values = (executor.buffers[f"{kind}_cache.{op.layer}"][:rows] for kind in "kv")
    query, output, selected = map(executor.exposed, (*op.inputs, *op.outputs))
    return compare_step(query, keys, values, lengths, output, selected, engine.parameters, exact=True)
