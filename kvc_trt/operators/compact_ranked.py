"""KvcCompactRanked: KvcCompact for layers whose budget is not known yet.

Rankings are nested: the best b tokens are among the best b' of any larger budget. So a layer keeps its best
`prompt_budget` with their ranks, and KvcTrim takes the rest away once SqueezeAttention (arXiv 2404.04793) has set the
budgets of all layers. At most one layer's full cache is alive at a time, as without layer budgets.
"""

from __future__ import annotations

import numpy as np
from onnx import FunctionProto

from kvc_trt.operators.compact import page_bounds, rank
from kvc_trt.operators.emitter import Emitter, Value
from kvc_trt.operators.function import function
from kvc_trt.operators.shapes import count_to, int32, one, size
from kvc_trt.operators.slots import into_slots, pad_end

NAME, TRIM = "KvcCompactRanked", "KvcTrim"
LAST_INDEX = np.int64(2**31 - 1)


def compact_ranked(pool_kernel: int) -> FunctionProto:
    """(q_window [B,H,W,D], k, v [B,G,S,D], prompt_lengths [B]) ->
    (k_kept, v_kept [B,G,n,D], kept, ranks INT64 [B,G,n]), n = min(prompt_budget, S).

    `kept` are prompt positions, ascending; `ranks` say which of them would be kept first. Padding ranks last.
    """
    emit = Emitter()
    wanted = emit.Min(one(emit, emit.attribute("prompt_budget")), size(emit, "k", 2))
    _, best = emit.TopK(rank(emit, pool_kernel), wanted, outputs=2, axis=2)
    kept, ranks = emit.TopK(best, wanted, outputs=2, axis=2, largest=0)
    where = emit.Unsqueeze(kept, [3])
    keys, values = (emit.GatherND(rows, where, batch_dims=2) for rows in ("k", "v"))
    outputs = {"k_kept": keys, "v_kept": values, "kept": kept, "ranks": ranks}
    return function(NAME, ("q_window", "k", "v", "prompt_lengths"), outputs, ("prompt_budget",), emit)


def trim(lowest: np.ndarray) -> FunctionProto:
    """(k_kept, v_kept [B,G,n,D], kept, ranks [B,G,n], budgets [B], prompt_lengths [B]) ->
    (k_cache, v_cache [B,G,C,D], bounds [B,G,2D,P], cache_lengths [B], indices INT32 [B,G,C]).

    Each row keeps its best `budgets` tokens, in their order in the prompt. `lowest` marks empty pages.
    """
    emit = Emitter()
    lengths = emit.Min("prompt_lengths", "budgets")
    entries = size(emit, "k_kept", 2)
    stays = emit.Less("ranks", emit.Reshape(lengths, [-1, 1, 1]))
    slots, _ = emit.TopK(emit.Where(stays, count_to(emit, entries), LAST_INDEX), entries, outputs=2, axis=2, largest=0)
    taken = emit.Min(slots, emit.Sub(entries, 1))
    stored = emit.Less(count_to(emit, entries), emit.Reshape(lengths, [-1, 1, 1]))
    keys, values = (_gathered(emit, rows, taken) for rows in ("k_kept", "v_kept"))
    k_cache, v_cache = (into_slots(emit, rows, emit.Unsqueeze(stored, [3])) for rows in (keys, values))
    positions = emit.Where(stored, emit.GatherElements("kept", taken, axis=2), -1)
    outputs = {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "bounds": page_bounds(emit, keys, stored, lowest),
        "cache_lengths": lengths,
        "indices": int32(emit, pad_end(emit, positions, emit.attribute("capacity"), np.int64(-1))),
    }
    inputs = ("k_kept", "v_kept", "kept", "ranks", "budgets", "prompt_lengths")
    return function(TRIM, inputs, outputs, ("capacity", "page_size"), emit)


def _gathered(emit: Emitter, rows: Value, slots: Value) -> Value:
    return str(emit.GatherND(rows, emit.Unsqueeze(slots, [3]), batch_dims=2))
