"""A prefill graph in parts: every node is in one, and equal layers give equal models."""

from __future__ import annotations

from collections import Counter

import pytest
from onnx import TensorProto, helper

from kvc_trt import policies
from kvc_trt.graph.build import build_decode, build_prefill
from kvc_trt.graph.prefill_parts import LENGTHS, LOGITS, TOKENS, cut_prefill
from kvc_trt.graph.weights import GraphWeights, write_weights
from kvc_trt.models.random_weights import RandomWeights
from tests.small_model import SMALL


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """make(policy, ...) -> (parameters, weights) of the small model."""

    def make(policy, **overrides):
        room = {"token_budget": 64, "max_input_len": 256, "max_output_len": 8}
        parameters = policies.resolve(policy, model=SMALL, **room, **overrides)
        path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
        write_weights(SMALL, RandomWeights(SMALL, 0), path, weights="fp32", length=parameters.max_sequence_len)
        return parameters, GraphWeights(path)

    return make


def parts_of(parts):
    return [parts.positions, *parts.steps, *parts.stores, parts.head]


@pytest.mark.parametrize(
    ("policy", "overrides"),
    [("full", {}), ("rocketkv", {"skip_layers": 1}), ("h2o", {}), ("snapkv++", {"layer_budget": "squeeze-online"})],
)
def test_every_node_that_matters_is_in_a_part_and_every_output_comes_from_one(made, policy, overrides):
    parameters, weights = made(policy, **overrides)
    model = build_prefill(SMALL, parameters, weights=weights)
    parts = cut_prefill(model)
    assert len(parts.steps) == len(parts.stores) == SMALL.num_hidden_layers + 1
    written = Counter(name for part in parts_of(parts) for name in part.outputs)
    assert set(written.values()) == {1}
    assert {output.name for output in model.graph.output} <= set(written)
    placed = {name for part in parts_of(parts) for node in part.nodes for name in node.output}
    left_out = [node for node in model.graph.node if not placed.intersection(node.output)]
    unread = {name for node in left_out for name in node.output}
    assert not unread & {name for part in parts_of(parts) for node in part.nodes for name in node.input}
    known = {TOKENS, LENGTHS, *written}
    assert all(set(part.inputs) <= known for part in parts_of(parts))


def test_only_attention_reads_more_than_its_block(made):
    parts = cut_prefill(build_prefill(SMALL, made("rocketkv")[0], weights=made("rocketkv")[1]))
    assert [len(step.up_to_block) for step in parts.steps] == [0, 2, 2, 2]
    assert LENGTHS not in {name for step in parts.steps for name in step.inputs}
    assert parts.head.outputs == (LOGITS,)


def test_equal_layers_give_equal_models_that_hold_no_weights(made):
    parameters, weights = made("snapkv++")
    parts = cut_prefill(build_prefill(SMALL, parameters, weights=weights))
    types = dict.fromkeys((name for part in parts_of(parts) for name in part.outputs), TensorProto.FLOAT)
    types |= {TOKENS: TensorProto.INT64, LENGTHS: TensorProto.INT64}
    one, other = (parts.model(step, types) for step in parts.steps[1:3])
    assert one.SerializeToString(deterministic=True) == other.SerializeToString(deterministic=True)
    assert not one.graph.initializer
    assert parts.steps[1].weights != parts.steps[2].weights


def test_a_node_that_holds_a_graph_is_refused(made):
    parameters, weights = made("full")
    model = build_prefill(SMALL, parameters, weights=weights)
    branch = helper.make_graph([], "branch", [], [helper.make_empty_tensor_value_info("logits")])
    model.graph.node.append(helper.make_node("If", ["logits"], ["x"], then_branch=branch, else_branch=branch))
    with pytest.raises(ValueError, match="a graph of its own"):
        cut_prefill(model)


def test_a_decode_graph_has_no_prompt(made):
    parameters, weights = made("full")
    with pytest.raises(ValueError, match="no prefill graph"):
        cut_prefill(build_decode(SMALL, parameters, weights=weights))
