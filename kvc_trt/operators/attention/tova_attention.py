"""KvcTovaAttention: append one token, attend to every entry, drop the one this query attended to least.

Source: TOVA (arXiv 2401.06104), section 3; exact rule in docs/policies/tova.md. All KV heads drop the same token; the
next one takes its slot, so the order of slots is not that of the text. In KvcTovaAttentionByRow each row uses a number
of slots of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvc_trt.operators.attention.heavy_hitter_attention import EMPTY, RECENT, SLOT_POSITIONS, AppendedToFree
from kvc_trt.operators.attention.stored_rows import CAPACITIES, RECENTS
from kvc_trt.operators.schema import INT64, Operator, Tensor
from kvc_trt.operators.shapes import Layout
from kvc_trt.operators.tensors import CACHE_LENGTHS, CAPACITY, K_CACHE, OUTPUT, STEP, V_CACHE, updated

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value


def _write(emit: Emitter, layout: Layout, *, by_row: bool = False) -> Mapping[str, Value]:
    """Write the body. A row that uses all its slots drops one entry: the one of least probability, summed over all
    query heads, that is not among the last `recent` tokens, the last one among equals."""
    step = AppendedToFree(emit, layout, by_row=by_row)
    output, received = step.attend()
    dropped = step.least(emit.ReduceSum(received, [1]))
    return {
        "output": output,
        **step.state(),
        "slot_positions_out": emit.Where(dropped, EMPTY, step.occupied),
    }


TOVA_ATTENTION = Operator(
    name="KvcTovaAttention",
    summary="Append one token, attend to every entry, drop the one this query attended to least.",
    inputs=(*STEP, SLOT_POSITIONS, CACHE_LENGTHS, Tensor("positions", INT64, ("B",), "of the new tokens in the text")),
    outputs=(OUTPUT, updated(K_CACHE), updated(V_CACHE), updated(SLOT_POSITIONS)),
    attributes=(CAPACITY, RECENT),
    write=_write,
    stores=True,
)


TOVA_ATTENTION_BY_ROW = replace(
    TOVA_ATTENTION,
    name="KvcTovaAttentionByRow",
    summary="KvcTovaAttention with a number of slots of its own for each row.",
    inputs=(*TOVA_ATTENTION.inputs, CAPACITIES, RECENTS),
    outputs=(*TOVA_ATTENTION.outputs, updated(CAPACITIES)),
    attributes=(CAPACITY,),
    write=partial(_write, by_row=True),
    native=False,
)
