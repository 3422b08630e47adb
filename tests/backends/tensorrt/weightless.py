"""Graphs at any size without their weights: a table of contents is all that building a graph needs."""

from __future__ import annotations

import math
import re

from onnx import ModelProto, helper

from kvc_trt import policies
from kvc_trt.graph.build import build_decode, build_extend, build_prefill
from kvc_trt.graph.state import ITEM_SIZE
from kvc_trt.graph.weight_plans import rotary_plans
from kvc_trt.graph.weights import GraphWeights, activation_dtype
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.presets import load_preset
from kvc_trt.models.sources.safetensors_file import TensorEntry
from kvc_trt.models.weights import expected_tensors

WITH_AN_ENGINE = ("full", "rocketkv", "snapkv++", "hybrid", "snapkv-gqa")
"""Policies whose layers differ; the other names of the registry are the same ones with other numbers."""


class WeightlessWeights(GraphWeights):
    """The table of contents of a weight file that was never written."""

    def __init__(self, config: ModelConfig, precision: str, length: int) -> None:
        self.location = "weights.safetensors"
        self.precision, self.dtype, self.bits = precision, activation_dtype(precision), None
        self._entries: dict[str, TensorEntry] = {}
        for plan in rotary_plans(config, length):
            self._add(plan.name, plan.dtype, plan.shape)
        shapes = expected_tensors(config)
        for name in sorted(shapes, key=_together):
            self._add(name, self.dtype, shapes[name])

    def _add(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        last = next(reversed(self._entries.values()), None)
        offset = 0 if last is None else last.offset + last.nbytes
        self._entries[name] = TensorEntry(dtype, tuple(shape), offset, math.prod(shape) * ITEM_SIZE[dtype])


def _together(name: str) -> str:
    """Projections of one input are adjacent, as in a weight file."""
    shared = re.sub(r"\.(gate|up)_proj\.(\w+)", r".gate_up.\2.\1", name)
    order = {"q": 0, "k": 1, "v": 2}
    return re.sub(r"\.([qkv])_proj\.(\w+)", lambda found: f".qkv.{found[2]}.{order[found[1]]}", shared)


def weightless_graphs(config: ModelConfig, parameters: PolicyParameters, precision: str) -> list[ModelProto]:
    """Prefill and decode; their initializers point into a file that does not exist."""
    weights = WeightlessWeights(config, precision, parameters.max_sequence_len)
    return [build(config, parameters, weights=weights) for build in (build_prefill, build_decode)]


def weightless_extend(config: ModelConfig, parameters: PolicyParameters, precision: str) -> ModelProto:
    """Return the extend graph, likewise."""
    weights = WeightlessWeights(config, precision, parameters.max_sequence_len)
    return build_extend(config, parameters, weights=weights)


def preset_parameters(name: str, policy: str) -> PolicyParameters:
    """Return the parameters of a preset's build; a policy that needs more than the preset's token budget gets it."""
    preset = load_preset(name)
    defaults = dict(preset.defaults)
    lengths = {key: defaults.pop(key) for key in ("max_input_len", "max_output_len")}
    budget = defaults.pop("token_budget")
    if policy == "snapkv-gqa":  # keeps its budget minus the answer: not smaller than its window
        budget = max(budget, lengths["max_output_len"] + 64)
    return policies.resolve(
        policy,
        model=preset.config,
        token_budget=None if policy == "full" else budget,
        **lengths,
        **policies.applicable(policy, defaults),
    )


def preset_graphs(name: str, policy: str, precision: str) -> list[ModelProto]:
    """Both graphs of a preset at its true shapes and full depth."""
    return weightless_graphs(load_preset(name).config, preset_parameters(name, policy), precision)


def weights_as_inputs(model: ModelProto) -> ModelProto:
    """Return a copy of the graph with every weight as an input: a parser needs its shape and type, not its values."""
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    del model.graph.initializer[:]
    return model
