"""Every pass on real graphs: its changes, its refusals, and that the program stays the same."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, TensorProto, helper

from kvc_trt.backends.tensorrt.lowering import (
    PASSES,
    PLUGINS,
    check_aliases,
    expected_aliases,
    expected_attention,
    expected_plugins,
    lower,
    lower_with_notes,
)
from kvc_trt.backends.tensorrt.lowering.operators import FIELDS, TensorRtInstallation
from kvc_trt.backends.tensorrt.lowering.outputs import add_best_token
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.graph import IR_VERSION
from kvc_trt.graph.state import state_tensors
from kvc_trt.kernels.stored_parts import parts_of
from kvc_trt.models.cache_formats import CACHE_FORMATS
from kvc_trt.models.presets import load_preset
from kvc_trt.operators import CONTRIB_DOMAIN, KVC_DOMAIN, OPSET
from kvc_trt.operators.compaction.compact import COMPACT
from kvc_trt.operators.compaction.store_tokens import STORE_TOKENS
from kvc_trt.operators.registry import OPERATORS
from kvc_trt.operators.schema import part_names, vector_of
from kvc_trt.operators.tensors import K_CACHE, V_CACHE
from kvc_trt.runtime.executor import NOT_FINITE
from tests.backends.tensorrt.weightless import preset_graphs, weightless_graphs
from tests.graph.small_models import FAMILIES, LLAMA, POLICIES, make_small_engine, open_session, prompts_of, resolve

AT_HAND = TensorRtInstallation((11, 4), PLUGINS)
EXECUTABLE = 4
"""Passes after which ONNX Runtime still executes a prefill graph; a decode graph after all but the last."""


def small_graphs(policy: str = "rocketkv", precision: str = "bf16", model=LLAMA, **changes):
    return weightless_graphs(model, resolve(policy, model, **changes), precision)


def lowered(model: ModelProto, **changes) -> ModelProto:
    return lower(model, **({"tensorrt": (11, 4), "plugins": PLUGINS} | changes))


def partly_lowered(model: ModelProto, passes: int) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    for step in PASSES[:passes]:
        step(copy, AT_HAND)
    return copy


def nodes_of(model: ModelProto, *kinds: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type in kinds]


def attributes_of(node: onnx.NodeProto) -> dict:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


# --- before and after, in ONNX Runtime ---


def answers(engine, model: ModelProto, feeds: dict) -> dict[str, np.ndarray]:
    session = open_session(model, engine.directory)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def prefill_feeds() -> dict[str, np.ndarray]:
    prompts = prompts_of(250, 77, 3)
    padded = np.full((3, 256), 3)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    return {"input_ids": padded, "prompt_lengths": np.array([250, 77, 3])}


@pytest.fixture(scope="module")
def make_engine(tmp_path_factory):
    return lambda *arguments, **changes: make_small_engine(tmp_path_factory.mktemp("engine"), *arguments, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", *FAMILIES])
@pytest.mark.parametrize("policy", ["full", "rocketkv"])
def test_written_out_shapes_change_no_bit_of_prefill(make_engine, family, policy):
    engine = make_engine(policy, model=FAMILIES.get(family, LLAMA), skip_layers=1 if policy != "full" else None)
    feeds = prefill_feeds()
    before = answers(engine, engine.prefill_model, feeds)
    model = partly_lowered(engine.prefill_model, 3)
    assert len(nodes_of(model, "KvcPrefillAttention")) == LLAMA.num_hidden_layers
    after = answers(engine, model, feeds)
    assert before.keys() == after.keys()
    for name, expected in before.items():
        np.testing.assert_array_equal(after[name], expected, err_msg=name)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("fp16", 2e-3)])
@pytest.mark.parametrize("family", ["llama", "longchat", "qwen3"])
def test_the_native_attention_computes_what_the_body_does(make_engine, family, precision, tolerance):
    """Equal up to the operator's rounding: it multiplies 16-bit queries, scaled and rounded once, with 16-bit keys."""
    engine = make_engine("full", precision, FAMILIES.get(family, LLAMA))
    feeds = prefill_feeds()
    before = answers(engine, engine.prefill_model, feeds)
    model = partly_lowered(engine.prefill_model, EXECUTABLE)
    assert not nodes_of(model, "KvcPrefillAttention")
    after = answers(engine, model, feeds)
    for name, expected in before.items():
        limit = tolerance * np.abs(expected.astype(np.float32)).max()
        difference = np.abs(after[name].astype(np.float32) - expected.astype(np.float32)).max()
        assert difference <= limit, f"{name}: {difference} > {limit}"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decode_graph_stays_the_same_program(make_engine, policy):
    """After all passes but the last ONNX Runtime gives the same bits, and the best token besides; the last one drops
    what only it executes."""
    engine = make_engine(policy)
    before = engine.decode_model
    after = partly_lowered(before, len(PASSES) - 1)
    generator = np.random.default_rng(0)
    feeds = {
        "token": np.array([5, 9]),
        "positions": np.array([21, 7]),
        "cache_lengths": np.tile(np.array([21, 7]), (LLAMA.num_hidden_layers, 1)),
    }
    for tensor in engine.state:
        feeds[tensor.name] = generator.standard_normal((2, *tensor.shape)).astype(np.float32)
    expected = answers(engine, before, feeds)
    expected["best"] = expected["logits"].argmax(-1)
    found = answers(engine, after, feeds)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


# --- single passes ---


def test_lowering_does_not_change_its_model():
    for model in small_graphs():
        before = model.SerializeToString(deterministic=True)
        lowered(model)
        assert model.SerializeToString(deterministic=True) == before


def test_weights_are_referred_to_and_not_read():
    for model in small_graphs():
        assert [tensor.name for tensor in lowered(model).graph.initializer] == [
            tensor.name for tensor in model.graph.initializer
        ]
        assert all(tensor.data_location == TensorProto.EXTERNAL for tensor in lowered(model).graph.initializer)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_reshape_names_its_last_width(policy):
    prefill, _ = small_graphs(policy)
    model = partly_lowered(prefill, 2)
    lists = {node.output[0]: attributes_of(node)["value"] for node in nodes_of(model, "Constant")}
    concats = {node.output[0]: node.input for node in nodes_of(model, "Concat")}
    for node in nodes_of(model, "Reshape"):
        last = concats.get(node.input[1], [node.input[1]])[-1]
        sizes = onnx.numpy_helper.to_array(lists[last]).tolist()
        assert sizes[-1] != -1 or node.input[0] == "input_ids", node.name
        assert -1 not in sizes[1:], node.name


def answering(rows: np.ndarray) -> ModelProto:
    """Return a decode graph whose logits are given to it."""
    sizes = ["batch", rows.shape[1]]
    values = [
        helper.make_tensor_value_info("token", TensorProto.INT64, ["batch"]),
        helper.make_tensor_value_info("given", TensorProto.FLOAT, sizes),
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, sizes),
    ]
    nodes = [helper.make_node("Identity", ["given"], ["logits"])]
    graph = helper.make_graph(nodes, "decode", values[:2], values[2:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)


def test_the_lowest_of_equal_logits_is_best_and_non_finite_ones_are_reported():
    rows = np.random.default_rng(0).standard_normal((9, 300)).astype(np.float32)
    rows[0, [290, 7, 40]] = 9.0
    rows[1] = -3.0
    rows[2, 11] = np.inf
    rows[3, 0] = np.nan
    rows[4, [5, 299]] = np.nan, np.inf
    rows[5], rows[6] = -np.inf, np.nan
    rows[7] = -np.inf
    rows[7, 299] = -1e38
    model = answering(rows)
    assert add_best_token(model, AT_HAND) == ["added best, each row's best of 300 tokens"]
    onnx.checker.check_model(model, full_check=True)
    logits, best = open_session(model).run(["logits", "best"], {"token": np.zeros(9, np.int64), "given": rows})
    assert best.dtype == np.int32
    assert best.tolist() == [7, 0, *[NOT_FINITE] * 5, 299, rows[8].argmax()]
    np.testing.assert_array_equal(logits, rows)


def test_only_a_step_answers_with_its_best_token():
    prefill, decode = small_graphs()
    assert "best" not in [output.name for output in lowered(prefill).graph.output]
    (best,) = [output for output in lowered(decode).graph.output if output.name == "best"]
    assert best.type.tensor_type.elem_type == TensorProto.INT32
    assert [dim.dim_param for dim in best.type.tensor_type.shape.dim] == ["batch"]
    assert not nodes_of(lowered(decode), "ArgMax", "TopK")


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_queries_are_scaled_in_fp32_and_the_operator_scales_by_one(precision):
    prefill, _ = small_graphs("full", precision)
    model = lowered(prefill)
    producers = {name: node for node in model.graph.node for name in node.output}
    attention = nodes_of(model, "Attention")
    assert len(attention) == LLAMA.num_hidden_layers == expected_attention(model)
    for node in attention:
        found = attributes_of(node)
        assert (found["is_causal"], found["scale"]) == (1, 1.0)
        assert found.get("TRT_decomposable", 0) == (precision == "fp32")
        scaled = producers[node.input[0]]
        if precision != "fp32":
            element = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}[precision]
            assert (scaled.op_type, attributes_of(scaled)["to"]) == ("Cast", element)
            scaled = producers[scaled.input[0]]
            assert attributes_of(producers[scaled.input[0]])["to"] == TensorProto.FLOAT
        scale = onnx.numpy_helper.to_array(attributes_of(producers[scaled.input[1]])["value"])
        assert scale.dtype == np.float32
        assert scale.item() == pytest.approx(LLAMA.head_size**-0.5, rel=1e-7)


@pytest.mark.parametrize("policy", POLICIES)
def test_remaining_kvc_nodes_are_plugins_named_and_counted(policy):
    prefill, decode = small_graphs(policy, skip_layers=1 if policy != "full" else None)
    pages = policy in ("rocketkv", "hybrid")
    compressed = LLAMA.num_hidden_layers - (policy != "full")
    for model, expected in (
        (lowered(prefill), {} if policy == "full" else {"KvcCompact": compressed}),
        (
            lowered(decode),
            {"KvcDenseAttention": 1, "KvcHybridAttention": compressed}
            if pages
            else {"KvcDenseAttention": LLAMA.num_hidden_layers},
        ),
    ):
        assert not model.functions
        assert expected_plugins(model) == expected
        for node in (node for node in model.graph.node if node.domain == KVC_DOMAIN):
            own = node.op_type == "KvcCompact" and policy in ("rocketkv", "snapkv++")
            by_length = ["by_length"] if own else []
            fields = [*FIELDS[node.op_type], *by_length, "plugin_namespace", "plugin_version"]
            assert [a.name for a in node.attribute] == fields
            assert attributes_of(node)["plugin_namespace"] == b"kvc"


@pytest.mark.parametrize("operator", sorted(PLUGINS))
def test_the_fields_are_those_of_the_plugin(operator):
    assert list(FIELDS[operator]) == [attribute.name for attribute in OPERATORS[operator].attributes]


def test_attributes_without_a_plugin_field_are_dropped():
    _, decode = small_graphs()
    for node in nodes_of(decode, "KvcHybridAttention"):
        node.attribute.append(helper.make_attribute("comment", "for people"))
    assert lowered(decode) == lowered(small_graphs()[1])


def test_logits_leave_in_fp32():
    for precision in ("fp16", "bf16"):
        for model in small_graphs(precision=precision):
            kinds = {output.name: output.type.tensor_type.elem_type for output in lowered(model).graph.output}
            assert kinds["logits"] == TensorProto.FLOAT


def test_the_notes_say_what_was_done():
    prefill, _ = small_graphs(precision="fp32")
    notes = lower_with_notes(prefill, tensorrt=(11, 4), plugins=PLUGINS).notes
    assert {step for step, _ in notes} <= {step.__name__ for step in PASSES}
    text = "\n".join(note for _, note in notes)
    assert f"{LLAMA.num_hidden_layers} x KvcCompact as plugin" in text
    assert "fp32: 3 x Attention without a fused kernel" in text


def test_a_preset_is_lowered_at_full_depth():
    preset = load_preset("llama3.1-70b")
    prefill, decode = preset_graphs("llama3.1-70b", "rocketkv", "bf16")
    assert expected_plugins(lowered(prefill)) == {"KvcCompact": preset.config.num_hidden_layers}
    assert expected_plugins(lowered(decode)) == {"KvcHybridAttention": preset.config.num_hidden_layers}


# --- refusals ---


def test_a_tensorrt_too_old_for_the_graphs_is_refused():
    with pytest.raises(UnsupportedEnvironment, match=r"TensorRT 10\.14: .*expected 10\.15 or newer") as caught:
        lowered(small_graphs()[1], tensorrt=(10, 14))
    assert caught.value.hint
    lowered(small_graphs()[1], tensorrt=(10, 15))


def test_a_plugin_missing_from_the_registry_is_named():
    with pytest.raises(
        UnsupportedEnvironment, match=r"KvcHybridAttention \(layers\.0/.*not in the registry, found Kvc"
    ):
        lowered(small_graphs()[1], plugins=PLUGINS - {"KvcHybridAttention"})


def test_a_renamed_attribute_is_refused():
    _, decode = small_graphs()
    for node in nodes_of(decode, "KvcHybridAttention"):
        for attribute in node.attribute:
            attribute.name = {"top_k": "topk"}.get(attribute.name, attribute.name)
    with pytest.raises(InputError, match="no attribute top_k"):
        lowered(decode)


def test_graphs_of_earlier_versions_have_no_bounds_in_fp8():
    _, decode = small_graphs()
    for node in nodes_of(decode, "KvcHybridAttention"):
        del node.attribute[[one.name for one in node.attribute].index("fp8_bounds")]
    found = nodes_of(lowered(decode), "KvcHybridAttention")
    assert [one.i for node in found for one in node.attribute if one.name == "fp8_bounds"] == [0] * len(found)


@pytest.mark.parametrize(
    ("operator", "domain", "message"),
    [
        ("Swish", "", "Sigmoid and Mul"),
        ("Loop", "", "operator of ours"),
        ("TensorScatter", "", "operator of ours"),
        ("MatMulNBits", CONTRIB_DOMAIN, "quantised for ONNX Runtime"),
        ("KvcQuantisedLinear", KVC_DOMAIN, "quantised for ONNX Runtime"),
        ("Sigmoid", "elsewhere", "operator of domain 'elsewhere'"),
        ("KvcNovelty", KVC_DOMAIN, "no plugin serves this operator"),
    ],
)
def test_operators_that_tensorrt_runs_otherwise_are_refused(operator, domain, message):
    _, decode = small_graphs()
    node = nodes_of(decode, "Sigmoid")[0]
    node.op_type, node.domain = operator, domain
    with pytest.raises(InputError, match=message):
        lowered(decode)


def test_a_graph_of_another_opset_is_refused():
    _, decode = small_graphs()
    decode.opset_import[0].version = 24
    with pytest.raises(InputError, match="opset 24, expected 23"):
        lowered(decode)


def test_the_graphs_have_nothing_that_needs_lowering_but_does_not_get_it():
    """Swish and TensorScatter were never in the artefact; that is checked, not rewritten."""
    for policy in POLICIES:
        for model in small_graphs(policy):
            kinds = Counter(node.op_type for node in lowered(model).graph.node)
            assert not {"Swish", "TensorScatter", "Loop", "If", "Scan"} & kinds.keys()


# --- aliases ---


def test_every_state_tensor_of_a_decode_graph_is_expected_in_place():
    prefill, decode = small_graphs()
    state = state_tensors(LLAMA, resolve("rocketkv"), "bfloat16")
    assert expected_aliases(lowered(decode)) == {tensor.aliased_output: tensor.name for tensor in state}
    assert expected_aliases(lowered(prefill)) == {}


def test_a_wrong_and_an_additional_alias_are_refused_and_a_missing_one_is_not():
    """An engine may report no alias of a plugin: the plugin compares the addresses itself."""
    expected = {"k_cache_out.0": "k_cache.0", "v_cache_out.0": "v_cache.0"}
    for reported in (expected, {"k_cache_out.0": "k_cache.0"}, {}):
        check_aliases(reported, expected)
    for reported, message in (
        (expected | {"v_cache_out.0": "k_cache.0"}, "v_cache_out.0: expected v_cache.0, found k_cache.0"),
        ({"logits": "k_cache.0"}, "logits: expected a buffer of its own, found k_cache.0"),
    ):
        with pytest.raises(UnsupportedEnvironment, match=f"an output shares the wrong buffer: {message}"):
            check_aliases(reported, expected)


# --- caches in a format ---


@pytest.mark.parametrize("tokens", [128, 384])
@pytest.mark.parametrize("form", ["int8", "fp8", "int4", "k8v4"])
def test_a_compaction_that_keeps_everything_stores_what_the_operator_does(emulation, form, tokens):
    """The node that stands for KvcStoreTokens, by the emulated kernels; also where the padded prompt is longer."""
    prefill, _ = small_graphs("full", kv_cache=form)
    assert not nodes_of(lowered(prefill), STORE_TOKENS.name)
    node = nodes_of(lowered(prefill), COMPACT.name)[0]
    numbers = {name: value for name, value in attributes_of(node).items() if isinstance(value, int)}
    capacity, heads, size = numbers["capacity"], LLAMA.num_key_value_heads, LLAMA.head_size
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(3, heads, tokens, size, generator=generator) for _ in range(2))
    lengths = torch.tensor([min(tokens, capacity), 77, 1])
    given = {"q_window": keys[:, :, :1].contiguous(), "k": keys, "v": values, "prompt_lengths": lengths}
    made = emulation.compute(COMPACT, {**given, **numbers})
    free = torch.arange(capacity) >= lengths[:, None]
    for tensor, table in ((K_CACHE, keys), (V_CACHE, values)):
        vector = vector_of(tensor, CACHE_FORMATS[form])
        room = torch.nn.functional.pad(table[:, :, :capacity], (0, 0, 0, max(0, capacity - tokens)))
        for name, part in zip(part_names(tensor, vector), parts_of(room, vector), strict=True):
            expected = part.masked_fill(free[:, None, :, None], 0)
            assert torch.equal(made[name].view(torch.uint8), expected.contiguous().view(torch.uint8)), name
