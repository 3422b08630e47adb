"""The members of the parameter structs follow from the operators' schemas, in an order that never changes."""

from __future__ import annotations

import pytest

from kvc_trt.kernels.parameters import kernel_of, members, size_members
from kvc_trt.kernels.rotated import LIBRARY_OPERATORS, ROTATED_DENSE_ATTENTION, ROTATED_HYBRID_ATTENTION
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.attention.hybrid_attention import HYBRID_ATTENTION
from kvc_trt.operators.attention.quest_attention import QUEST_ATTENTION
from kvc_trt.operators.compaction.compact import COMPACT, COMPACT_TURN
from kvc_trt.operators.schema import Operator
from kvc_trt.operators.turns.append_block import APPEND_BLOCK, RAISE_BOUNDS
from kvc_trt.operators.turns.join_block import JOIN_BLOCK
from kvc_trt.operators.turns.replace import REPLACE_BOUNDS, REPLACE_CACHE

COMMON = "struct_bytes dtype batch heads kv_heads head_size"
OF_CACHE = "struct_bytes dtype batch kv_heads"
# The C ABI since version 5: a caller that was compiled against it passes its structs in this order.
KEYS, VALUES = "k_cache k_scale k_minimum", "v_cache v_scale v_minimum"
CACHES = f"{KEYS} {VALUES}"
ORDER = {
    COMPACT.name: f"{COMMON} window pool_kernel page_size fp8_bounds by_length cache_format reserved "
    "prompt_length prompt_budget capacity kv_stride_batch kv_stride_head kv_stride_token q_window k v prompt_lengths "
    f"prompt_budgets pool_kernels {CACHES} bounds cache_lengths indices",
    HYBRID_ATTENTION.name: f"{COMMON} page_size top_r fp8_bounds cache_format recent capacity top_k token_budget "
    f"dense_until selected_width query k_new v_new {CACHES} bounds cache_lengths output selected",
    DENSE_ATTENTION.name: f"{COMMON} cache_format capacity query k_new v_new {CACHES} cache_lengths output",
    COMPACT_TURN.name: f"{COMMON} window pool_kernel page_size fp8_bounds by_length cache_format reserved "
    "prompt_length prompt_budget capacity q_window k joined_k_scale joined_k_minimum v joined_v_scale "
    f"joined_v_minimum prompt_lengths window_lengths prompt_budgets pool_kernels {CACHES} bounds cache_lengths indices",
    APPEND_BLOCK.name: f"{OF_CACHE} head_size cache_format reserved capacity block k_new v_new {CACHES} cache_lengths "
    "lengths",
    RAISE_BOUNDS.name: f"{OF_CACHE} head_size page_size fp8_bounds cache_format reserved block pages k_new bounds "
    "cache_lengths lengths",
    JOIN_BLOCK.name: f"{OF_CACHE} head_size cache_format reserved capacity block k_new v_new {CACHES} cache_lengths "
    "lengths k joined_k_scale joined_k_minimum v joined_v_scale joined_v_minimum joined_lengths",
    REPLACE_CACHE.name: f"{OF_CACHE} head_size cache_format reserved capacity {CACHES} slot_positions "
    "k_kept k_kept_scale k_kept_minimum v_kept v_kept_scale v_kept_minimum positions_kept",
    REPLACE_BOUNDS.name: f"{OF_CACHE} channels fp8_bounds reserved pages bounds bounds_kept",
    ROTATED_HYBRID_ATTENTION.name: f"{OF_CACHE} head_size heads page_size top_r fp8_bounds cache_format recent "
    f"capacity top_k token_budget dense_until selected_width joined cosines sines {CACHES} bounds cache_lengths output "
    "selected query",
    ROTATED_DENSE_ATTENTION.name: f"{OF_CACHE} head_size heads cache_format capacity joined cosines sines {CACHES} "
    "cache_lengths output query",
}
POINTERS = {
    "query": "const void*",
    "k_cache": "void*",
    "prompt_lengths": "const int64_t*",
    "selected": "int32_t*",
    "indices": "int32_t*",
    "output": "void*",
}


@pytest.mark.parametrize("operator", LIBRARY_OPERATORS, ids=lambda operator: operator.name)
def test_members_keep_the_order_of_the_abi(operator: Operator) -> None:
    assert [member.name for member in members(operator)] == ORDER[operator.name].split()


@pytest.mark.parametrize("operator", LIBRARY_OPERATORS, ids=lambda operator: operator.name)
def test_written_tensors_are_not_const(operator: Operator) -> None:
    for member in members(operator):
        others = ((JOIN_BLOCK, "k_cache"), (ROTATED_HYBRID_ATTENTION, "query"), (ROTATED_DENSE_ATTENTION, "query"))
        if member.name in POINTERS and (operator, member.name) not in others:
            assert member.type == POINTERS[member.name], member.name


def test_lengths_are_written_by_the_compaction_and_read_by_a_step() -> None:
    types = [{member.name: member.type for member in members(one)} for one in (COMPACT, HYBRID_ATTENTION)]
    assert [names["cache_lengths"] for names in types] == ["int64_t*", "const int64_t*"]


def test_every_size_that_a_struct_holds_has_its_member() -> None:
    sizes = size_members(HYBRID_ATTENTION)
    assert sizes == {
        "B": "batch", "H": "heads", "G": "kv_heads", "D": "head_size", "C": "capacity", "K": "selected_width"
    }  # fmt: skip


def test_a_size_that_does_not_follow_from_others_has_a_member() -> None:
    assert "pages" not in size_members(HYBRID_ATTENTION).values()
    assert size_members(RAISE_BOUNDS)["P"] == "pages"
    assert size_members(REPLACE_BOUNDS)["2D"] == "channels"


def test_an_operator_without_a_kernel_has_no_struct() -> None:
    with pytest.raises(ValueError, match="KvcQuestAttention has no kernel"):
        kernel_of(QUEST_ATTENTION)
