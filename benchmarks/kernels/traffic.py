"""Bytes that a kernel must move and products that it must compute, as formulas, and the floor in microseconds.

Symbols: B batch, H query heads, G KV heads, D head size, W window, n prompt tokens, C capacity, P pages, m entries of a
row, k tokens that a step reads, r channels that score pages, e bytes of an element. A byte counts as often as the
algorithm needs it: K twice in a compaction (the statistics of a row must be known before its votes are), else once. Of
caches in a format codes, scales and minima count.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.kernels.cases import HEAD_SIZE, HEADS, KV_HEADS, Case
from kvc_trt.profile.accelerators import Accelerator

FLOAT, INDEX = 4, 4
_SELECTION = ("prepare_step", "page_scores", "select_tokens")
FUSED = {"score_and_select": _SELECTION, "cluster_step": (*_SELECTION, "sparse_attention")}
"""Kernels that stand for several: the values that those pass to each other never leave the multiprocessors."""
ALIKE = {"select_prompt_in_cluster": "select_prompt"}
"""Kernels that stand for one, and move the same bytes."""


@dataclass(frozen=True)
class Traffic:
    """The least bytes and operations of a launch or a call."""

    bytes: int
    """Read and written."""
    flops: int = 0
    """Multiplications and additions that tensor cores can do."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.bytes + other.bytes, self.flops + other.flops)

    def floor_microseconds(self, bandwidth: float, flops: float) -> float:
        """Return the slower of moving the bytes and computing the products."""
        return 1e6 * max(self.bytes / bandwidth, self.flops / flops)

    def floor_on(self, accelerator: Accelerator) -> float:
        """Return the floor by a GPU's published figures."""
        return self.floor_microseconds(accelerator.bandwidth, accelerator.flops_16bit)


def call_traffic(operation: str, case: Case) -> Traffic:
    """One call of `compact`, `hybrid` or `dense`: inputs and results, without the tensors that pass from kernel to
    kernel.

    Intermediates (scores, votes, partial outputs) are small enough for the second-level cache.
    """
    total = Traffic(0)
    for name, kernel in kernel_traffic(operation, case).items():
        total += Traffic(kernel.bytes - _intermediate_bytes(case).get(name, 0), kernel.flops)
    return total


def launch_traffic(operation: str, case: Case, kernel: str) -> Traffic:
    """One launch of a call, also of a kernel that stands for several; nothing where it only reduces intermediates."""
    kernels, between = kernel_traffic(operation, case), _intermediate_bytes(case)
    total = kernels.get(ALIKE.get(kernel, kernel), Traffic(0))
    for part in FUSED.get(kernel, ()):
        total += Traffic(kernels[part].bytes - between.get(part, 0), kernels[part].flops)
    return total


def kernel_traffic(operation: str, case: Case) -> dict[str, Traffic]:
    """Return each kernel of one call by name; those that only reduce a few intermediates are left out."""
    return {"compact": _compact, "hybrid": _hybrid, "dense": _dense}[operation](case)


def _compact(case: Case) -> dict[str, Traffic]:
    """Two passes over K [B,G,n,D], pooling and selection of the votes [B,G,n], and the gathering of the kept tokens."""
    parameters, heads = case.parameters, case.batch * KV_HEADS
    kept = parameters.kept_of(case.prompt)
    moved = 2 * kept * HEAD_SIZE * case.item_bytes + parameters.capacity * case.pair_bytes
    bounds = 2 * parameters.stored_pages(case.dtype) * HEAD_SIZE * case.bound_bytes
    gather = {
        "gather_in_format" if case.is_in_format else "gather_cache": Traffic(
            heads * (moved + bounds + INDEX * parameters.capacity)
        )
    }
    if not case.is_compacted:
        return gather
    keys = Traffic(
        heads * case.prompt * HEAD_SIZE * case.item_bytes,
        2 * case.batch * HEADS * parameters.window * case.prompt * HEAD_SIZE,
    )
    votes = Traffic(heads * case.prompt * FLOAT)
    return {
        "observation_statistics": keys,
        "observation_votes": keys + votes,
        "pool_votes": votes + votes,
        "select_prompt": votes,
        **gather,
    }


def _hybrid(case: Case) -> dict[str, Traffic]:
    """Append, page scores, selection, attention over k tokens. A row that fits its budget scores no pages."""
    parameters, heads = case.parameters, case.batch * KV_HEADS
    pages = -(-case.entries // parameters.page_size) if case.is_sparse else 0
    raised, bounds = 2 * HEAD_SIZE * case.bound_bytes, parameters.top_r * pages * case.bound_bytes
    scores = Traffic(case.batch * HEADS * pages * FLOAT)
    selected = Traffic(heads * INDEX * parameters.selected_width)
    return {
        _of_cache("prepare_step", case): Traffic(heads * raised) + _append(case),
        "page_scores": Traffic(heads * bounds) + scores,
        "select_tokens": scores + selected,
        _of_cache("sparse_attention", case): _attention(case, case.tokens_read),
    }


def _dense(case: Case) -> dict[str, Traffic]:
    """Append, then attention over the uncompressed cache."""
    return {
        _of_cache("append", case): _append(case),
        _of_cache("sparse_attention", case): _attention(case, case.dense_entries),
    }


def _of_cache(kernel: str, case: Case) -> str:
    """Return the name of a step's kernel that stores or reads keys and values."""
    return f"{kernel}_in_format" if case.is_in_format else kernel


def _append(case: Case) -> Traffic:
    """K and V of one token, read and written."""
    return Traffic(case.batch * KV_HEADS * (2 * HEAD_SIZE * case.item_bytes + case.pair_bytes))


def _attention(case: Case, tokens: int) -> Traffic:
    """K and V of the tokens, query and output; two products."""
    row = KV_HEADS * tokens * case.pair_bytes + 2 * HEADS * HEAD_SIZE * case.item_bytes
    return Traffic(case.batch * row, 4 * case.batch * HEADS * tokens * HEAD_SIZE)


def _intermediate_bytes(case: Case) -> dict[str, int]:
    """Return the bytes of each kernel that another kernel of the same call wrote or will read."""
    heads = case.batch * KV_HEADS
    votes = heads * case.prompt * FLOAT
    pages = -(-case.entries // case.parameters.page_size) if case.is_sparse else 0
    scores = case.batch * HEADS * pages * FLOAT
    return {
        "observation_votes": votes,
        "pool_votes": 2 * votes,
        "select_prompt": votes,
        "page_scores": scores,
        "select_tokens": scores,
    }
