"""KvcQuestAttention: append one token, attend to the pages with the highest bounds, per query head (Quest).

Source: Quest (arXiv 2406.10774), algorithm 1; exact rule in docs/policies/quest.md. Bounds are channel-major, page
maxima of K and of -K [B,G,2D,P]: max(q·max K, q·min K) summed over channels is the product of [max(q,0), max(-q,0)].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvc_trt.operators.attention.attend import GroupedQuery, attend
from kvc_trt.operators.attention.selective import LOWEST_RANK, AppendedStep, append, ascending, attend_all_or
from kvc_trt.operators.fp8_bounds import write_values
from kvc_trt.operators.schema import INT32, Operator, Tensor
from kvc_trt.operators.shapes import Layout, count_to, float32, one, size
from kvc_trt.operators.tensors import (
    BOUNDS,
    CACHE_LENGTHS,
    DENSE_UNTIL,
    FP8_BOUNDS,
    K_CACHE,
    OUTPUT,
    PAGE_SIZE,
    STEP,
    TOKEN_BUDGET,
    TOP_K,
    V_CACHE,
    updated,
)

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value


def _write(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    """Write the body of KvcQuestAttention.

    `top_k` is a multiple of `page_size`. A row with at most max(token_budget, dense_until) entries attends to all of
    them. If all rows of the batch are that short, the code of KvcDenseAttention runs on the same slice.
    """
    place, step = append(emit, layout)
    newest = emit.Div(place.slots, emit.attribute("page_size"))
    bounds = place.raise_bounds("bounds", step.new.keys.read(emit), newest, layout)

    def sparse(branch: Emitter) -> list[Value]:
        tokens, taken = _tokens_of_pages(branch, step, _ranked_pages(branch, step, bounds, newest))
        return _attend_per_head(branch, step, tokens, taken)

    output, read = attend_all_or(emit, step, sparse, lists=layout.shape.fixed_heads)
    selected = ascending(emit, read, emit.Max(step.limit, emit.attribute("top_k")))
    return {"output": output, **step.caches(), "bounds_out": bounds, "selected": selected}


def _ranked_pages(emit: Emitter, step: AppendedStep, bounds: Value, newest: Value) -> Value:
    """Return the highest score any key within a page's bounds could have, FLOAT [B,G,g,P]; the newest page is first."""
    query = step.query.plain
    size_of = emit.Abs(query)
    # Not Relu, which may drop a NaN. Exact, since both sums are 0 or 2|q|.
    both_signs = emit.Mul(emit.Concat(emit.Add(size_of, query), emit.Sub(size_of, query), axis=3), 0.5)
    bound = write_values(emit, bounds) if step.layout.fp8_bounds else float32(emit, bounds)
    score = emit.MatMul(both_signs, bound)
    pages = count_to(emit, size(emit, bounds, 3))
    comparable = emit.And(emit.Not(emit.IsNaN(score)), emit.Less(pages, newest))
    return str(emit.Where(emit.Equal(pages, newest), -LOWEST_RANK, emit.Where(comparable, score, LOWEST_RANK)))


def _tokens_of_pages(emit: Emitter, step: AppendedStep, ranked: Value) -> tuple[Value, Value]:
    """Return the tokens of each head's best pages: (tokens INT64 [B,G,g*T], taken BOOL of the same shape).

    T covers the row that needs the most pages; other rows take fewer.
    """
    page_size, lengths = emit.attribute("page_size"), step.lengths
    in_use = emit.Div(emit.Add(lengths, emit.Sub(page_size, 1)), page_size)
    budget = emit.Div(emit.attribute("top_k"), page_size)
    wanted = emit.Where(emit.LessOrEqual(lengths, step.limit), in_use, emit.Min(in_use, budget))
    count = emit.ReduceMax(wanted, keepdims=0)
    _, pages = emit.TopK(ranked, one(emit, count), outputs=2, axis=3)
    within = emit.Unsqueeze(emit.Less(emit.Range(0, count, 1), wanted), [4])
    tokens = emit.Add(emit.Mul(emit.Unsqueeze(pages, [4]), page_size), emit.Range(0, page_size, 1))
    taken = emit.And(within, emit.Less(tokens, emit.Unsqueeze(lengths, [4])))
    flat = [0, 0, -1]
    return emit.Reshape(tokens, flat), emit.Reshape(taken, flat)


def _attend_per_head(emit: Emitter, step: AppendedStep, tokens: Value, taken: Value) -> list[Value]:
    """Every query head gathers its own entries; -> [attended [B,H,1,D], tokens INT64 [B,H,T], -1 where not taken]."""
    heads, head_size = step.layout.shape.fixed_heads, step.layout.shape.head_size
    by_head = [0, heads, -1]
    keys, values = step.gather(emit, emit.Reshape(step.rows(emit, tokens), by_head))
    alone = [0, heads, 1, head_size]
    softmax = step.layout.softmax
    sinks = None if step.query.sinks is None else emit.Reshape(step.query.sinks, [heads, 1, 1])
    query = GroupedQuery(emit.Reshape(step.query.plain, alone), emit.Reshape(step.query.scaled, alone), softmax, sinks)
    visible = emit.Reshape(taken, by_head)
    attended = attend(emit, query, keys, values, emit.Unsqueeze(visible, [2]))
    return [attended, emit.Where(visible, emit.Reshape(tokens, by_head), -1)]


QUEST_ATTENTION = Operator(
    name="KvcQuestAttention",
    summary="Append one token, attend to the pages whose bounds promise most, per query head.",
    inputs=(*STEP, BOUNDS, CACHE_LENGTHS),
    outputs=(
        OUTPUT,
        updated(K_CACHE),
        updated(V_CACHE),
        updated(BOUNDS),
        Tensor("selected", INT32, ("B", "H", "K"), "slots that each query head read, ascending, -1 past the end"),
    ),
    attributes=(PAGE_SIZE, TOP_K, TOKEN_BUDGET, DENSE_UNTIL, FP8_BOUNDS),
    formulas={"K": "max(top_k, token_budget, dense_until)"},
    write=_write,
    attends=True,
    stores=True,
)
