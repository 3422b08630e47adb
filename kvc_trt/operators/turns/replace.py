"""KvcReplaceCache, KvcReplaceBounds: overwrite a cache with the tokens that a turn's compaction kept.

No graph on disk has them: an executor that binds one buffer as a cache's input and output needs no such step. TensorRT
shares a buffer only where a plugin says so, and a compaction, which reads a joined copy, does not have the cache among
its inputs. TensorRT's lowering puts these behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvc_trt.operators.attention.heavy_hitter_attention import SLOT_POSITIONS
from kvc_trt.operators.schema import BOUND, CACHE, INT32, Kernel, Operator, Tensor
from kvc_trt.operators.shapes import Layout
from kvc_trt.operators.tensors import BOUNDS, FP8_BOUNDS, K_CACHE, V_CACHE, updated
from kvc_trt.operators.vectors import stored_tables

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value


K_KEPT = Tensor("k_kept", CACHE, ("B", "G", "C", "D"), "what the cache holds from now on", stored="keys")
V_KEPT = Tensor("v_kept", CACHE, ("B", "G", "C", "D"), stored="values")


def _write_cache(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcReplaceCache."""
    kept = stored_tables(layout, K_KEPT, V_KEPT).map(emit.Identity)
    return {
        **kept.named(updated(K_CACHE), updated(V_CACHE)),
        "slot_positions_out": emit.Identity("positions_kept"),
    }


def _write_bounds(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcReplaceBounds."""
    return {"bounds_out": emit.Identity("bounds_kept")}


REPLACE_CACHE = Operator(
    name="KvcReplaceCache",
    summary="Overwrite a cache and the positions of its slots.",
    inputs=(
        K_CACHE,
        V_CACHE,
        SLOT_POSITIONS,
        K_KEPT,
        V_KEPT,
        Tensor("positions_kept", INT32, ("B", "G", "C")),
    ),
    outputs=(updated(K_CACHE), updated(V_CACHE), updated(SLOT_POSITIONS)),
    write=_write_cache,
    stores=True,
    kernel=Kernel("kvc_replace_cache", "KvcReplaceCacheParams"),
    native=False,
)
REPLACE_BOUNDS = Operator(
    name="KvcReplaceBounds",
    summary="Overwrite the bounds of a cache's pages.",
    inputs=(BOUNDS, Tensor("bounds_kept", BOUND, ("B", "G", "2D", "P"), "the bounds from now on")),
    outputs=(updated(BOUNDS),),
    attributes=(FP8_BOUNDS,),
    write=_write_bounds,
    kernel=Kernel("kvc_replace_bounds", "KvcReplaceBoundsParams"),
    native=False,
)
