"""Tensors that several operators have as inputs or outputs, each described once."""

from __future__ import annotations

from dataclasses import replace

from kvc_trt.models.cache_formats import CACHE_FORMATS
from kvc_trt.operators.dimensions import INT32_MAX, MAX_TOKENS
from kvc_trt.operators.schema import BOUND, CACHE, INT32, INT64, Attribute, Tensor, parts_of

QUERY = Tensor("query", CACHE, ("B", "H", "D"), "after RoPE")
K_NEW = Tensor("k_new", CACHE, ("B", "G", "D"), "after RoPE")
V_NEW = Tensor("v_new", CACHE, ("B", "G", "D"))
K_CACHE = Tensor("k_cache", CACHE, ("B", "G", "C", "D"), stored="keys")
V_CACHE = Tensor("v_cache", CACHE, ("B", "G", "C", "D"), stored="values")
VECTOR_PARTS = frozenset(
    part.name for form in CACHE_FORMATS.values() for tensor in (K_CACHE, V_CACHE) for part in parts_of(tensor, form)
)
"""Names of all tensors that hold keys and values in some format: codes, scales and minima."""
BOUNDS = Tensor(
    "bounds",
    BOUND,
    ("B", "G", "2D", "P"),
    "page maxima of K, then of -K; empty pages: the lowest finite value",
    fill="lowest",
)
CACHE_LENGTHS = Tensor(
    "cache_lengths", INT64, ("B",), "on the device: entries before the append, where the new one goes"
)
OUTPUT = Tensor("output", CACHE, ("B", "H", "D"))

STEP = (QUERY, K_NEW, V_NEW, K_CACHE, V_CACHE)
"""The first inputs of every decode operator."""

PROMPT_LENGTHS = Tensor("prompt_lengths", INT64, ("B",), "on the device: n, clamped to 0..S")
WINDOW = Tensor(
    "q_window", CACHE, ("B", "H", "W", "D"), "row i is the query at n-W+i; rows before the prompt are ignored"
)
PROMPT_KEYS = Tensor("k", CACHE, ("B", "G", "S", "D"), "after RoPE, by the strides above")
PROMPT_VALUES = Tensor("v", CACHE, ("B", "G", "S", "D"), "same strides")
STORED_LENGTHS = Tensor("cache_lengths", INT64, ("B",), "min(n, the row's budget)")
INDICES = Tensor("indices", INT32, ("B", "G", "C"), "prompt position of each slot, ascending; -1 past the row's end")

PAGE_SIZE = Attribute("page_size", 1, INT32_MAX, "tokens of a page", bits=32)
TOP_K = Attribute("top_k", 1, MAX_TOKENS, "tokens that a sparse step reads", at_most="C")
TOKEN_BUDGET = Attribute("token_budget", 0, INT32_MAX)
DENSE_UNTIL = Attribute(
    "dense_until", 0, INT32_MAX, "rows of m <= max(token_budget, dense_until) read all their entries"
)
FP8_BOUNDS = Attribute(
    "fp8_bounds", 0, 1, "1: bounds are fp8 (E5M2), rounded up; 0: they have the cache's type", bits=32
)
READ_ALWAYS = Attribute(
    "recent", 0, MAX_TOKENS, "last tokens that a sparse step reads in any case, of its top_k", bits=32, at_most="top_k"
)
SINCE_BEFORE = {FP8_BOUNDS.name: 0, READ_ALWAYS.name: 0}
"""The values of attributes that calls in the graphs of older engines do not have."""
CAPACITY = Attribute("capacity", 1, MAX_TOKENS, "slots of the cache")


def updated(state: Tensor) -> Tensor:
    """Return the output that holds `state` after the step, in the same buffer."""
    return replace(state, name=f"{state.name}_out", alias=state.name, summary="")
