"""The graphs are valid, have the promised names, are small, and run on any batch."""

from __future__ import annotations

import re
from dataclasses import replace

import onnx
import pytest

from kvc_trt.errors import InputError
from kvc_trt.graph.build import build_decode, build_prefill
from kvc_trt.graph.state import state_tensors
from kvc_trt.graph.weights import GraphWeights, write_weights
from kvc_trt.models.config import LongRope
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.operators import KVC_DOMAIN
from tests.graph.small_models import FAMILIES, LLAMA, POLICIES, open_session, resolve

EVERY_OUTPUT = {"KvcPrefillAttention": 1, "KvcCompact": 5, "KvcHybridAttention": 5, "KvcDenseAttention": 3}


@pytest.fixture(scope="module")
def weights_of(tmp_path_factory):
    """weights_of(family, precision) -> GraphWeights of that small model, written once."""
    known: dict[tuple[str, str], GraphWeights] = {}

    def find(family, precision="fp32"):
        if (family, precision) not in known:
            path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
            model = FAMILIES.get(family, LLAMA)
            write_weights(model, RandomWeights(model, 0), path, weights=precision, length=300)
            known[family, precision] = GraphWeights(path)
            known[family, precision].directory = path.parent
        return known[family, precision]

    return find


def both(model, parameters, weights):
    return [build(model, parameters, weights=weights) for build in (build_prefill, build_decode)]


def check(model, directory):
    path = directory / "checked.onnx"
    onnx.save(model, path)
    onnx.checker.check_model(path, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, check_type=True, data_prop=True)
    assert len(inferred.graph.value_info) > len(model.graph.node) / 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_under_every_policy_passes_the_full_checker(weights_of, family, policy):
    model, weights = FAMILIES[family], weights_of(family)
    for graph in both(model, resolve(policy, model, skip_layers=1), weights):
        check(graph, weights.directory)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(("family", "policy"), [("qwen2", "rocketkv"), ("qwen3", "hybrid")])
def test_half_precision_graphs_pass_the_full_checker(weights_of, family, policy, precision):
    model, weights = FAMILIES[family], weights_of(family, precision)
    for graph in both(model, resolve(policy, model, skip_layers=1), weights):
        check(graph, weights.directory)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantised_graphs_pass_the_checker_and_have_no_float_matrix(weights_of, precision):
    weights = weights_of("qwen2", precision)
    for graph, products in zip(both(FAMILIES["qwen2"], resolve("rocketkv"), weights), (22, 13), strict=True):
        check_path = weights.directory / "checked.onnx"
        onnx.save(graph, check_path)
        onnx.checker.check_model(check_path, full_check=True)
        kinds = [node.op_type for node in graph.graph.node]
        assert kinds.count("KvcQuantisedLinear") == products
        assert kinds.count("KvcQuantisedRows") == 1
        assert not {"Gemm", "MatMul"} & set(kinds)


@pytest.mark.parametrize("policy", POLICIES)
def test_names_types_and_shapes_are_the_contract(weights_of, policy):
    parameters = resolve(policy, skip_layers=1)
    prefill, decode = both(LLAMA, parameters, weights_of("llama"))
    tensors = state_tensors(LLAMA, parameters, "float32")
    names = [tensor.name for tensor in tensors]

    def shapes(values):
        return {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}

    assert shapes(prefill.graph.input) == {"input_ids": ["batch", "sequence"], "prompt_lengths": ["batch"]}
    assert [value.name for value in prefill.graph.output] == ["logits", "cache_lengths", *names]
    assert [value.name for value in decode.graph.input] == ["token", "positions", "cache_lengths", *names]
    outputs = shapes(decode.graph.output)
    assert list(outputs) == ["logits", *(tensor.aliased_output for tensor in tensors)]
    assert outputs["logits"] == ["batch", 97]
    assert shapes(decode.graph.input)["cache_lengths"] == [3, "batch"]
    for tensor in tensors:
        assert outputs[tensor.aliased_output] == ["batch", *tensor.shape]
    assert (decode.ir_version, decode.opset_import[0].version) == (11, 23)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_operator_carries_its_plugin_and_lists_every_output(weights_of, policy):
    for graph in both(LLAMA, resolve(policy, skip_layers=1), weights_of("llama")):
        nodes = [node for node in graph.graph.node if node.domain == KVC_DOMAIN]
        bodies = {body.name: body for body in graph.functions}
        assert {node.op_type for node in nodes} == set(bodies)
        for node in nodes:
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            assert (attributes.pop("plugin_namespace"), attributes.pop("plugin_version")) == (b"kvc", b"1")
            assert set(attributes) == set(bodies[node.op_type].attribute)
            assert len(node.output) == len(bodies[node.op_type].output) == EVERY_OUTPUT[node.op_type]
            assert len(node.input) == len(bodies[node.op_type].input)
            assert all(node.output)


@pytest.mark.parametrize(
    ("policy", "prefill_ops", "decode_ops"),
    [
        ("full", {"KvcPrefillAttention": 3}, {"KvcDenseAttention": 3}),
        ("rocketkv", {"KvcPrefillAttention": 3, "KvcCompact": 2}, {"KvcDenseAttention": 1, "KvcHybridAttention": 2}),
        ("snapkv++", {"KvcPrefillAttention": 3, "KvcCompact": 2}, {"KvcDenseAttention": 3}),
        ("hybrid", {"KvcPrefillAttention": 3, "KvcCompact": 2}, {"KvcDenseAttention": 1, "KvcHybridAttention": 2}),
    ],
)
def test_a_policy_is_a_composition_and_skipped_layers_take_no_part(weights_of, policy, prefill_ops, decode_ops):
    graphs = both(LLAMA, resolve(policy, skip_layers=1), weights_of("llama"))
    for graph, expected in zip(graphs, (prefill_ops, decode_ops), strict=True):
        kinds = [node.op_type for node in graph.graph.node if node.domain == KVC_DOMAIN]
        assert {kind: kinds.count(kind) for kind in set(kinds)} == expected


def test_a_graph_holds_no_weights(weights_of):
    weights = weights_of("qwen2")
    for graph in both(FAMILIES["qwen2"], resolve("rocketkv"), weights):
        assert graph.ByteSize() < 100_000
        external = [tensor.name for tensor in graph.graph.initializer if tensor.data_location == 1]
        assert len(external) == len(graph.graph.initializer)
        assert sum(name == "model.embed_tokens.weight" for name in external) == 1
        assert "lm_head.weight" not in external


def test_a_tensor_that_padding_separates_is_joined_in_the_graph(tmp_path):
    """Odd sizes: q, k and v do not touch in the file, so the graph concatenates them when it is loaded."""
    model = replace(LLAMA, hidden_size=20, num_attention_heads=2, num_key_value_heads=1, head_size=2, qkv_bias=True)
    path = tmp_path / "weights.safetensors"
    write_weights(model, RandomWeights(model, 0), path, weights="fp16", length=300)
    decode = build_decode(model, resolve("full", model), weights=GraphWeights(path))
    assert any(re.fullmatch(r"layers\.0/Concat_\d+", node.name) for node in decode.graph.node)
    open_session(decode, tmp_path)


def test_weights_that_an_older_version_quantised_are_refused(weights_of, monkeypatch):
    weights = weights_of("qwen2", "int4")
    monkeypatch.setattr(
        weights, "_entries", {name: entry for name, entry in weights._entries.items() if "embed" not in name}
    )
    with pytest.raises(InputError, match=r"weights\.safetensors: quantised by an older version"):
        build_decode(FAMILIES["qwen2"], resolve("full", FAMILIES["qwen2"]), weights=weights)


def test_rotary_tables_that_are_too_short_are_refused(weights_of):
    with pytest.raises(InputError, match="300 positions"):
        build_decode(LLAMA, resolve("full", max_input_len=400), weights=weights_of("llama"))


def test_rotary_tables_of_longer_sequences_are_refused_where_they_differ(tmp_path):
    """LongRoPE has other factors beyond the original length; a weight file for 300 positions holds those."""
    path, factors = tmp_path / "weights.safetensors", (1.0,) * (LLAMA.head_size // 2)
    model = replace(LLAMA, rotary_scaling=LongRope(factors, factors, 280, 1.0))
    write_weights(model, RandomWeights(model, 0), path, weights="fp32", length=300)
    build_decode(model, resolve("full", model, max_input_len=280), weights=GraphWeights(path))
    with pytest.raises(InputError, match="LongRoPE's factors are those of sequences longer than 280 tokens"):
        build_decode(model, resolve("full", model, max_input_len=200), weights=GraphWeights(path))
