"""KvcDenseAttention: append one token, attend to every entry.

Serves `full`, skipped layers and policies that only evict.
"""

from __future__ import annotations

from onnx import FunctionProto

from kvc_trt.operators.append import Place
from kvc_trt.operators.attend import attend_first, attend_slots, group_query, ungroup
from kvc_trt.operators.emitter import Emitter, Value
from kvc_trt.operators.function import function
from kvc_trt.operators.shapes import HeadShape, scalar, size

NAME = "KvcDenseAttention"
INPUTS = ("query", "k_new", "v_new", "k_cache", "v_cache", "cache_lengths")
ATTRIBUTES = ("dense_until",)


def dense_attention(shape: HeadShape) -> FunctionProto:
    """(query [B,H,D], k_new, v_new [B,G,D], k_cache, v_cache [B,G,C,D], cache_lengths [B]) ->
    (output [B,H,D], k_cache, v_cache).

    Entries are sliced out before they are attended where that pays (less than half of the cache is in use) and for
    at most `dense_until` entries, the lengths up to which a sparse engine attends densely on the same slice: there
    the two agree bit for bit. Otherwise the cache is read in place.
    """
    emit = Emitter()
    place = Place(emit, "cache_lengths", shape)
    keys, values = place.append("k_cache", "k_new"), place.append("v_cache", "v_new")
    lengths = emit.Add(place.slots, 1)
    longest = emit.ReduceMax(lengths, keepdims=0)
    query = group_query(emit, "query", shape)

    def sliced(branch: Emitter) -> list[Value]:
        return [attend_first(branch, query, keys, values, lengths, longest)]

    def in_place(branch: Emitter) -> list[Value]:
        return [attend_slots(branch, query, keys, values, lengths)]

    mostly_empty = emit.Less(emit.Mul(longest, 2), scalar(emit, size(emit, keys, 2)))
    short = emit.LessOrEqual(longest, emit.attribute("dense_until"))
    attended = emit.choose(emit.Or(mostly_empty, short), sliced, in_place, outputs=1)
    output = ungroup(emit, attended, "query", shape)
    outputs = {"output": output, "k_cache_out": keys, "v_cache_out": values}
    return function(NAME, INPUTS, outputs, ATTRIBUTES, emit)
