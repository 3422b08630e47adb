"""Preset models at their true shapes and full depth, through NVIDIA's own parser.

Those with experts or sliding layers are not lowered (docs/models.md). Each of the others has two of the policies that
have an engine; `make test-everything` tries all of them. Weights are inputs of the network
there: the parser wants their shape and type, not their values.
"""

from __future__ import annotations

from collections import Counter

import pytest
from onnx import TensorProto

from kvc_trt.backends.tensorrt.lowering import PLUGINS, expected_aliases, lower
from kvc_trt.models.presets import load_preset
from kvc_trt.operators import KVC_DOMAIN
from tests.backends.tensorrt.weightless import WITH_AN_ENGINE, preset_graphs, weights_as_inputs
from tests.dense_presets import dense_presets

pytestmark = pytest.mark.tensorrt

TYPES = {
    TensorProto.FLOAT: "FLOAT",
    TensorProto.FLOAT16: "HALF",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.INT32: "INT32",
    TensorProto.INT64: "INT64",
}
PRECISION = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def sampled(number: int) -> tuple[str, ...]:
    """Return two policies for the preset of this number, so that every policy meets presets of several families."""
    return tuple(WITH_AN_ENGINE[(number + step) % len(WITH_AN_ENGINE)] for step in (0, 2))


CASES = [
    pytest.param("llama3.1-8b", ("rocketkv",), id="llama3.1-8b-rocketkv"),
    *(
        pytest.param(name, sampled(number), id=f"{name}-sampled", marks=pytest.mark.slow)
        for number, name in enumerate(dense_presets())
    ),
    *(
        pytest.param(name, WITH_AN_ENGINE, id=name, marks=[pytest.mark.slow, pytest.mark.exhaustive])
        for name in dense_presets()
    ),
]


def lowered_preset(name: str, policy: str):
    precision = PRECISION[load_preset(name).config.dtype]
    return [
        lower(weights_as_inputs(graph), tensorrt=(11, 4), plugins=PLUGINS)
        for graph in preset_graphs(name, policy, precision)
    ]


def declared_outputs(model):
    outputs = {}
    for output in model.graph.output:
        tensor = output.type.tensor_type
        sizes = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim]
        outputs[output.name] = [sizes, TYPES[tensor.elem_type]]
    return outputs


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "policies"), CASES)
def test_nvidias_parser_reads_prefill_and_decode_of_every_preset(ask_parser, name, policies):
    config = load_preset(name).config
    graphs = [graph for policy in policies for graph in lowered_preset(name, policy)]
    for model, answer in zip(graphs, ask_parser(*graphs), strict=True):
        assert answer["parsed"], answer["errors"]
        assert answer["problem"] is None
        ours = Counter(node.op_type for node in model.graph.node if node.domain == KVC_DOMAIN)
        assert answer["plugins"] == ours
        assert answer["kinds"].get("PLUGIN_V3", 0) == sum(ours.values())
        assert answer["outputs"] == declared_outputs(model)
        assert answer["aliases"] == expected_aliases(model)
        prompt = model.graph.name == "prefill"
        fp32 = config.dtype == "float32"
        assert answer["attention"] == [["UPPER_LEFT", fp32, False]] * (config.num_hidden_layers if prompt else 0)
        assert answer["kinds"]["ROTARY_EMBEDDING"] == (2 if prompt else 1) * config.num_hidden_layers
