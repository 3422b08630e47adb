"""Small models through NVIDIA's parser and builder up to the plan, and mistakes that must stop earlier."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from kvc_trt.backends.tensorrt.lowering import PASSES, PLUGINS, expected_aliases, lower
from kvc_trt.backends.tensorrt.lowering.operators import TensorRtInstallation
from kvc_trt.errors import InputError
from kvc_trt.graph import IR_VERSION
from kvc_trt.models.cache_formats import CACHE_FORMATS
from kvc_trt.operators import OPSET
from tests.backends.tensorrt.weightless import weightless_graphs, weights_as_inputs
from tests.graph.small_models import FAMILIES, LLAMA, resolve
from tests.oracles.family_models import MODELS, our_config

pytestmark = pytest.mark.tensorrt


def graphs_of(
    policy: str, precision: str = "bf16", model=LLAMA, *, leave_out: str | None = None, **settings
) -> list[ModelProto]:
    """Both graphs, lowered by all passes but one."""
    parameters = resolve(policy, model, **settings, **({} if policy == "full" else {"skip_layers": 1}))
    graphs = [weights_as_inputs(graph) for graph in weightless_graphs(model, parameters, precision)]
    assert leave_out is None or leave_out in [step.__name__ for step in PASSES]
    for graph in graphs:
        for step in PASSES:
            if step.__name__ != leave_out:
                step(graph, TensorRtInstallation((11, 4), PLUGINS))
    return graphs


# --- what is built ---


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("precision", "policies"),
    [
        ("bf16", ("rocketkv",)),
        pytest.param("bf16", ("full", "snapkv++", "hybrid", "snapkv-gqa"), marks=pytest.mark.slow),
        pytest.param("fp16", ("rocketkv", "full"), marks=pytest.mark.slow),
        pytest.param("fp32", ("rocketkv", "full"), marks=pytest.mark.slow),
    ],
)
def test_prefill_and_decode_graphs_become_plans(ask_parser, precision, policies):
    check_plans(ask_parser(*(graph for policy in policies for graph in graphs_of(policy, precision)), plan=True))


@pytest.mark.slow
def test_layers_with_different_budgets_become_plans(ask_parser):
    """Capacities and pages differ from layer to layer; each plugin has its layer's numbers."""
    parameters = replace(resolve("rocketkv"), layer_budgets=(60, 40, 30))
    graphs = [
        lower(weights_as_inputs(graph), tensorrt=(11, 4), plugins=PLUGINS)
        for graph in weightless_graphs(LLAMA, parameters, "bf16")
    ]
    check_plans(answers := ask_parser(*graphs, plan=True))
    caches = [answers[0]["outputs"][f"k_cache.{layer}"][0][2] for layer in range(3)]
    assert caches == [parameters.layer_capacity(layer) for layer in range(3)] == [68, 48, 38]


@pytest.mark.slow
def test_graphs_of_every_family_become_plans(ask_parser):
    check_plans(
        ask_parser(*(graph for model in FAMILIES.values() for graph in graphs_of("rocketkv", model=model)), plan=True)
    )


@pytest.mark.slow
def test_graphs_with_parts_that_llama_lacks_become_plans(ask_parser):
    """LayerNorm, norms of results, plain feed-forward blocks, both blocks side by side, layers that do not rotate."""
    models = [our_config(name) for name in ("gpt-neox", "glm4", "smollm3")]
    check_plans(ask_parser(*(graph for model in models for graph in graphs_of("rocketkv", model=model)), plan=True))


@pytest.mark.slow
def test_nvidias_parser_takes_every_family_that_the_lowering_takes(ask_parser):
    graphs: dict[str, list] = {}
    for name in MODELS:
        with suppress(InputError):
            graphs[name] = graphs_of("rocketkv", model=our_config(name))
    taken = {our_config(name).architecture.removesuffix("ForCausalLM") for name in graphs}
    assert taken >= {"Cohere", "Falcon", "Granite", "Mistral", "OPT", "Olmo", "Olmo2", "Phi3", "Qwen3", "Starcoder2"}
    for name, answer in zip(
        (name for name, pair in graphs.items() for _ in pair),
        ask_parser(*(graph for pair in graphs.values() for graph in pair)),
        strict=True,
    ):
        assert answer["parsed"], (name, answer["errors"])


@pytest.mark.slow
def test_graphs_of_every_cache_format_become_plans(ask_parser):
    forms = [form for form in CACHE_FORMATS if form != "auto"]
    assert len(forms) == 4
    check_plans(ask_parser(*(graph for form in forms for graph in graphs_of("rocketkv", kv_cache=form)), plan=True))


def check_plans(answers: list[dict]) -> None:
    for answer in answers:
        assert answer["parsed"], answer["errors"]
        assert answer["problem"] is None
        assert answer["plan_bytes"] > 0, answer["log"]


@pytest.mark.slow
def test_weights_come_from_the_file_beside_the_graph(ask_parser, tmp_path):
    from kvc_trt.graph.build import build_decode, build_prefill
    from kvc_trt.graph.weights import GraphWeights, write_weights
    from kvc_trt.models.random_weights import RandomWeights

    parameters, path = resolve("rocketkv"), tmp_path / "weights.safetensors"
    write_weights(LLAMA, RandomWeights(LLAMA, 0), path, weights="bf16", length=parameters.max_sequence_len)
    files = []
    for build in (build_prefill, build_decode):
        model = lower(build(LLAMA, parameters, weights=GraphWeights(path)), tensorrt=(11, 4), plugins=PLUGINS)
        files.append(tmp_path / f"{model.graph.name}.onnx")
        onnx.save(model, files[-1])
    for answer in ask_parser(*files, plan=True):
        assert answer["parsed"], answer["errors"]
        assert answer["problem"] is None
        assert answer["plan_bytes"] > path.stat().st_size / 2, answer["log"]


# --- what must fail ---


def test_a_missing_plugin_does_not_parse(ask_parser):
    prefill, decode = ask_parser(*graphs_of("rocketkv"), without=["KvcCompact", "KvcHybridAttention"])
    for answer in (prefill, decode):
        assert not answer["parsed"]
        assert any("Plugin not found" in error for error in answer["errors"]), answer["errors"]


@pytest.mark.slow
def test_with_its_body_in_the_graph_a_missing_plugin_parses_and_is_found_by_counting(ask_parser):
    _, decode = graphs_of("full", leave_out="drop_functions")
    (whole,) = ask_parser(decode)
    assert (whole["parsed"], whole["problem"]) == (True, None)
    (answer,) = ask_parser(decode, without=["KvcDenseAttention"])
    assert answer["parsed"], answer["errors"]
    assert answer["errors"] == []
    assert answer["problem"] == "plugin layers after parsing: KvcDenseAttention: expected 3, found 0"


def test_a_renamed_field_does_not_parse(ask_parser):
    _, decode = graphs_of("rocketkv")
    for node in decode.graph.node:
        for attribute in node.attribute:
            attribute.name = {"top_k": "topk"}.get(attribute.name, attribute.name)
    (answer,) = ask_parser(decode)
    assert not answer["parsed"]
    assert any("Could not create the plugin" in error for error in answer["errors"]), answer["errors"]


@pytest.mark.slow
def test_a_dropped_alias_is_found(ask_parser):
    _, decode = graphs_of("rocketkv")
    (whole,) = ask_parser(decode)
    assert whole["aliases"] == expected_aliases(decode)
    (damaged,) = ask_parser(decode, damage="alias")
    assert damaged["parsed"]
    assert "v_cache_out.0" not in damaged["aliases"]


def test_aliases_need_their_preview_feature(ask_parser):
    (answer,) = ask_parser(graphs_of("rocketkv")[1], plan=True, aliases=False)
    assert answer["plan_bytes"] == 0
    assert any("ALIASED_PLUGIN_IO_10_03 not enabled" in error for error in answer["log"]), answer["log"]


# --- why there is each pass ---


def test_without_the_widths_the_parser_refuses_rotary_embedding(ask_parser):
    answer = ask_parser(graphs_of("rocketkv", leave_out="write_out_widths")[0])[0]
    assert not answer["parsed"]
    assert any("must be divisible by num_heads" in error for error in answer["errors"]), answer["errors"]


def test_without_their_reshape_the_caches_of_a_whole_prompt_have_no_known_size(ask_parser):
    (answer,) = ask_parser(graphs_of("full", leave_out="fix_output_shapes")[0])
    assert answer["outputs"]["k_cache.0"][0] == [-1, LLAMA.num_key_value_heads, -1, LLAMA.head_size]


def test_fp32_attention_is_not_built_unless_it_may_be_taken_apart(ask_parser):
    (answer,) = ask_parser(graphs_of("full", "fp32", leave_out="let_fp32_attention_decompose")[0], plan=True)
    assert answer["plan_bytes"] == 0
    assert any("not supported by a dedicated kernel" in error for error in answer["log"]), answer["log"]


def one_attention(operator: str, **attributes) -> ModelProto:
    node = helper.make_node(operator, ["q", "k", "v"], ["o"], name="attention", **attributes)
    values = [
        helper.make_tensor_value_info(name, TensorProto.BFLOAT16, ["batch", heads, "sequence", 128])
        for name, heads in (("q", 8), ("k", 2), ("v", 2), ("o", 8))
    ]
    graph = helper.make_graph([node], "one", values[:3], values[3:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)


def test_left_to_itself_the_parser_computes_the_scale_in_the_type_of_the_queries(ask_parser):
    """The parser adds two square roots and a reciprocal for queries and for keys: lowering/prefill_attention.py."""
    graphs = [one_attention("Attention", is_causal=1, **scale) for scale in ({}, {"scale": 1.0})]
    alone, told = ask_parser(*graphs, plugins="none")
    assert alone["parsed"]
    assert told["parsed"]
    assert alone["kinds"].get("UNARY", 0) == 6
    assert told["kinds"].get("UNARY", 0) == 0


def test_attention_that_lost_its_mask_on_the_way_is_found(ask_parser):
    """TRT_Attention of this version does not know is_causal, and says nothing."""
    causal, other = ask_parser(
        one_attention("Attention", is_causal=1, scale=1.0), one_attention("TRT_Attention", is_causal=1), plugins="none"
    )
    assert (causal["attention"], causal["problem"]) == ([["UPPER_LEFT", False, False]], None)
    assert other["attention"] == [["NONE", False, False]]
    assert other["problem"] == "attention layers after parsing: expected 0, all causal; found 1, 0 causal"
