"""The normative semantics of every compression operator in PyTorch: literal, float32 and float64, never in place.

Every other executor is compared with these functions, index by index. They are written to be read: one file per method
(`methods/`) or step, one row of a batch at a time, so that no row can see another row or its padding. `model/` is a
whole model built from them. Each is imported when it is first used, so that importing this package loads no torch.
"""

from typing import TYPE_CHECKING

from kvc_trt.lazy import lazy_names

if TYPE_CHECKING:
    from kvc_trt.reference.bounds import append, page_bounds
    from kvc_trt.reference.cache import LayerCache, Selection
    from kvc_trt.reference.compaction import Compacted, compact
    from kvc_trt.reference.dense import dense_attention
    from kvc_trt.reference.methods.expected_attention import (
        ExpectedQueries,
        expected_queries,
        future_rotation,
        keep_expected,
    )
    from kvc_trt.reference.methods.heavy_hitters import (
        heavy_hitter_attention,
        keep_heavy_hitters,
        keep_heavy_hitters_of_turn,
    )
    from kvc_trt.reference.methods.hybrid import hybrid_attention
    from kvc_trt.reference.methods.keydiff import keep_distinct
    from kvc_trt.reference.methods.quest import quest_attention
    from kvc_trt.reference.methods.recent import keep_recent
    from kvc_trt.reference.methods.sparq import sparq_attention
    from kvc_trt.reference.methods.topk import exact_topk
    from kvc_trt.reference.methods.tova import keep_attended, tova_attention
    from kvc_trt.reference.softmax import Observed, Softmax
    from kvc_trt.reference.stored import Stored, store
    from kvc_trt.reference.turn import Turn, append_block, compact_turn, extend_attention, join
else:
    _MODULES = {
        "kvc_trt.reference.bounds": ("append", "page_bounds"),
        "kvc_trt.reference.cache": ("LayerCache", "Selection"),
        "kvc_trt.reference.compaction": ("Compacted", "compact"),
        "kvc_trt.reference.dense": ("dense_attention",),
        "kvc_trt.reference.methods.topk": ("exact_topk",),
        "kvc_trt.reference.methods.expected_attention": (
            "ExpectedQueries",
            "expected_queries",
            "future_rotation",
            "keep_expected",
        ),
        "kvc_trt.reference.methods.heavy_hitters": (
            "heavy_hitter_attention",
            "keep_heavy_hitters",
            "keep_heavy_hitters_of_turn",
        ),
        "kvc_trt.reference.methods.hybrid": ("hybrid_attention",),
        "kvc_trt.reference.methods.keydiff": ("keep_distinct",),
        "kvc_trt.reference.methods.quest": ("quest_attention",),
        "kvc_trt.reference.methods.recent": ("keep_recent",),
        "kvc_trt.reference.softmax": ("Observed", "Softmax"),
        "kvc_trt.reference.methods.sparq": ("sparq_attention",),
        "kvc_trt.reference.stored": ("Stored", "store"),
        "kvc_trt.reference.methods.tova": ("keep_attended", "tova_attention"),
        "kvc_trt.reference.turn": ("Turn", "append_block", "compact_turn", "extend_attention", "join"),
    }
    __getattr__ = lazy_names(__name__, {name: module for module, names in _MODULES.items() for name in names})

__all__ = [
    "Compacted",
    "ExpectedQueries",
    "LayerCache",
    "Observed",
    "Selection",
    "Softmax",
    "Stored",
    "Turn",
    "append",
    "append_block",
    "compact",
    "compact_turn",
    "dense_attention",
    "exact_topk",
    "expected_queries",
    "extend_attention",
    "future_rotation",
    "heavy_hitter_attention",
    "hybrid_attention",
    "join",
    "keep_attended",
    "keep_distinct",
    "keep_expected",
    "keep_heavy_hitters",
    "keep_heavy_hitters_of_turn",
    "keep_recent",
    "page_bounds",
    "quest_attention",
    "sparq_attention",
    "store",
    "tova_attention",
]
