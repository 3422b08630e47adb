"""An operator's facts are written once, and the rest derives from them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.operators.attention.hybrid_attention import HYBRID_ATTENTION
from kvc_trt.operators.compaction.compact import COMPACT
from kvc_trt.operators.dimensions import (
    INT32_MAX,
    MAX_TOKENS,
    SIZES,
    Dimensions,
    Refusal,
    evaluate,
    names_in,
    stored_pages,
)
from kvc_trt.operators.emitter import Emitter
from kvc_trt.operators.registry import KERNEL_OPERATORS, OPERATORS
from kvc_trt.operators.schema import CACHE, Attribute, Operator, Tensor
from kvc_trt.operators.shapes import HeadShape, Layout

NUMBERS = {"page_size": 4, "top_r": 8, "top_k": 16, "token_budget": 32, "dense_until": 24, "fp8_bounds": 0, "recent": 2}
COMPACTION = {"prompt_budget": 8, "capacity": 16, "pool_kernel": 3, "page_size": 4, "fp8_bounds": 0}
LAYOUT = Layout(
    HeadShape(4, 2, 16),
    numbers={
        "pool_kernel": 7,
        "reallocate": 1,
        "budgeted_layers": 3,
        "squeeze_share": 0.5,
        "kernel": 4,
    },
)


def same_names(tensors) -> dict[str, str]:
    return {tensor.name: tensor.name for tensor in tensors}


def test_every_operator_of_the_package_is_registered():
    assert {"KvcPrefillAttention", "KvcCompact", "KvcHybridAttention", "KvcTrim"} <= set(OPERATORS)
    of_prompts_and_steps = {"KvcCompact", "KvcHybridAttention", "KvcDenseAttention"}
    of_turns = {
        "KvcAppendBlock",
        "KvcRaiseBounds",
        "KvcJoinBlock",
        "KvcCompactTurn",
        "KvcReplaceCache",
        "KvcReplaceBounds",
    }
    assert {one.name for one in KERNEL_OPERATORS} == of_prompts_and_steps | of_turns


def test_neither_onnx_nor_torch_is_imported_for_a_schema():
    program = (
        "import sys, kvc_trt.operators.registry;"
        "print([name for name in ('onnx', 'torch', 'onnxruntime') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda operator: operator.name)
def test_the_body_has_the_names_of_the_schema(operator):
    body = operator.body(LAYOUT)
    assert list(body.input) == [tensor.name for tensor in operator.inputs]
    assert list(body.output) == [tensor.name for tensor in operator.outputs]
    assert list(body.attribute) == [attribute.name for attribute in operator.attributes]


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda operator: operator.name)
def test_tensors_updated_in_place_are_inputs_of_the_same_type_and_shape(operator):
    inputs = {tensor.name: tensor for tensor in operator.inputs}
    for tensor in operator.outputs:
        if tensor.alias is not None:
            source = inputs[tensor.alias]
            assert (tensor.element, tensor.shape, tensor.fill) == (source.element, source.shape, source.fill)


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda operator: operator.name)
def test_every_size_of_an_output_is_known_from_inputs_and_attributes(operator):
    sizes = Dimensions(element_bytes=2)
    for tensor in operator.inputs:
        for symbol in tensor.shape:
            sizes.fix(symbol, {"2D": 32, "D/2": 8, "1": 1}.get(symbol, 16), tensor.name)
    values = {attribute.name: 1 if attribute.name == "page_size" else 16 for attribute in operator.attributes}
    operator.derive(values, sizes)
    for tensor in operator.outputs:
        assert sizes.shape(tensor.shape)


def test_a_call_has_every_input_output_and_attribute_in_the_order_of_the_schema():
    emit = Emitter()
    outputs = {tensor.name: f"layer.{tensor.name}" for tensor in HYBRID_ATTENTION.outputs}
    shuffled = dict(reversed(NUMBERS.items()))
    assert HYBRID_ATTENTION.call(emit, same_names(HYBRID_ATTENTION.inputs), outputs, **shuffled) == outputs
    (node,) = emit.nodes
    assert (node.domain, node.op_type) == ("kvc", "KvcHybridAttention")
    assert list(node.input) == [tensor.name for tensor in HYBRID_ATTENTION.inputs]
    assert list(node.output) == list(outputs.values())
    assert {a.name: a.i for a in node.attribute if a.type == 2} == NUMBERS
    unnamed = COMPACT.call(emit, same_names(COMPACT.inputs), **COMPACTION)
    assert list(unnamed.values()) == list(emit.nodes[1].output)


@pytest.mark.parametrize(
    ("inputs", "outputs", "numbers", "message"),
    [
        ({"query": "q"}, None, NUMBERS, "expected inputs query, k_new"),
        (same_names(HYBRID_ATTENTION.inputs) | {"more": "x"}, None, NUMBERS, "expected inputs"),
        (same_names(HYBRID_ATTENTION.inputs), {"output": "o"}, NUMBERS, "expected outputs output, k_cache_out"),
        (same_names(HYBRID_ATTENTION.inputs), None, NUMBERS | {"sinks": 4}, "expected attributes page_size"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(inputs, outputs, numbers, message):
    with pytest.raises(ValueError, match=message):
        HYBRID_ATTENTION.call(Emitter(), inputs, outputs, **numbers)


def test_a_body_that_forgets_an_output_is_refused():
    x, y = (Tensor(name, CACHE, ("B",)) for name in "xy")
    operator = Operator("KvcHalf", "", (x,), (y,), lambda emit, layout: {})
    with pytest.raises(ValueError, match="KvcHalf: expected outputs y"):
        operator.body(LAYOUT)


def test_numbers_out_of_range_are_refused_by_field():
    COMPACT.check(COMPACTION)
    for name, value, message in (
        ("page_size", 0, "field page_size: expected 1..2147483647, found 0"),
        ("pool_kernel", 4, "field pool_kernel: expected an odd number, found 4"),
        ("fp8_bounds", 2, "field fp8_bounds: expected 0..1, found 2"),
        ("prompt_budget", 17, "field prompt_budget: expected at most the capacity of 16, found 17"),
    ):
        with pytest.raises(Refusal, match=message):
            COMPACT.check(COMPACTION | {name: value})


def test_derived_sizes_are_computed_and_checked():
    sizes = Dimensions(element_bytes=4)
    for symbol, size in {"B": 2, "G": 2, "D": 16, "C": 33}.items():
        sizes.fix(symbol, size, "test")
    HYBRID_ATTENTION.derive(NUMBERS, sizes)
    assert sizes.shape(("B", "G", "2D", "P")) == (2, 2, 32, 9)
    assert sizes["K"] == 32
    with pytest.raises(Refusal, match="bounds: expected pages = 9, found 8"):
        sizes.bind("bounds", ("B", "G", "2D", "P"), (2, 2, 32, 8))
    with pytest.raises(Refusal, match="k: expected 2 dimensions, found 1"):
        sizes.bind("k", ("B", "G"), (2,))


def test_pages_follow_from_the_size_of_the_caches_elements_as_soon_as_it_is_known():
    for element_bytes, pages in ((4, 9), (2, 16)):
        sizes = Dimensions(element_bytes)
        sizes.fix("C", 33, "k_cache")
        HYBRID_ATTENTION.derive(NUMBERS, sizes)
        assert sizes["P"] == pages
        fp8 = Dimensions(element_bytes)
        fp8.fix("C", 33, "k_cache")
        HYBRID_ATTENTION.derive(NUMBERS | {"fp8_bounds": 1}, fp8)
        assert fp8["P"] == 16
    sizes = Dimensions()
    sizes.fix("C", 33, "k_cache")
    HYBRID_ATTENTION.derive(NUMBERS, sizes)
    assert "P" not in sizes


@given(st.integers(1, MAX_TOKENS), st.integers(1, INT32_MAX))
def test_in_16_and_8_bit_rows_of_bounds_start_at_a_multiple_of_16_bytes(capacity, page_size):
    pages = -(-capacity // page_size)
    assert stored_pages(capacity, page_size, 4, 0) == pages
    for stored, multiple in (
        (stored_pages(capacity, page_size, 2, 0), 8),
        (stored_pages(capacity, page_size, 2, 1), 16),
        (stored_pages(capacity, page_size, 4, 1), 16),
    ):
        assert stored % multiple == 0
        assert 0 <= stored - pages < multiple


def test_the_type_of_bounds_follows_from_the_call():
    (bounds,) = (one for one in HYBRID_ATTENTION.inputs if one.name == "bounds")
    assert [HYBRID_ATTENTION.element_of(bounds, NUMBERS | {"fp8_bounds": fp8}) for fp8 in (0, 1)] == ["CACHE", "INT8"]
    assert HYBRID_ATTENTION.element_of(HYBRID_ATTENTION.inputs[0], NUMBERS | {"fp8_bounds": 1}) == "CACHE"


def test_a_contradictory_size_names_the_tensor_that_states_it():
    sizes = Dimensions()
    sizes.fix("K", 7, "selected")
    with pytest.raises(Refusal, match="fields top_k, token_budget, dense_until: expected selected width = 7, found 32"):
        HYBRID_ATTENTION.derive(NUMBERS, sizes)


def test_formulas_are_evaluated_and_other_expressions_refused():
    values = {"C": 33, "page_size": 4, "top_k": 7, "token_budget": 3}
    assert evaluate("(C + page_size - 1) // page_size", values) == 9
    assert evaluate("max(top_k + 1, token_budget * 2)", values) == 8
    assert evaluate("min(C, 5)", values) == 5
    assert evaluate("stored_pages(C, page_size, 2, 0)", values) == 16
    assert names_in("max(top_k + 1, token_budget, top_k)") == ("top_k", "token_budget")
    for formula in ("C ** 2", "abs(C)", "C if C else 1", "1.5"):
        with pytest.raises(ValueError, match="expected whole numbers"):
            evaluate(formula, values)


def test_an_engine_without_a_number_is_refused():
    with pytest.raises(ValueError, match="the layout has no pool_kernel"):
        COMPACT.body(Layout(HeadShape(4, 2, 16)))


def test_every_symbol_that_the_kernels_know_has_a_range():
    assert all(size.least <= size.most for size in SIZES.values())


def test_attributes_are_int32_in_tensorrt():
    for operator in OPERATORS.values():
        for attribute in operator.attributes:
            assert isinstance(attribute, Attribute)
            assert 0 <= attribute.least <= attribute.most < 2**31
