"""Small models, prompts and single operators for the tests of the graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from kvc_trt import policies
from kvc_trt.graph import IR_VERSION
from kvc_trt.graph.build import build_decode, build_extend, build_prefill
from kvc_trt.graph.rewrites.expose import expose, index_lists
from kvc_trt.graph.state import StateTensor, state_tensors
from kvc_trt.graph.weights import GraphWeights, write_weights
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import FeedForward, ModelConfig, ModelDescription, RopeScaling, Yarn
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.operators import KVC_DOMAIN, OPSET
from kvc_trt.operators.emitter import Emitter
from kvc_trt.operators.registry import OPERATORS
from tests.small_model import SMALL

LLAMA = SMALL
FAMILIES = {
    "llama3.1": replace(LLAMA, rotary_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 128)),
    "longchat": replace(LLAMA, num_key_value_heads=4, rotary_scaling=RopeScaling("linear", 8.0)),
    "qwen2": replace(LLAMA, architecture="Qwen2ForCausalLM", qkv_bias=True, tie_word_embeddings=True),
    "qwen3": replace(LLAMA, architecture="Qwen3ForCausalLM", qk_norm=True, head_size=32),
    "biased": replace(LLAMA, qkv_bias=True, output_bias=True),
    "yarn": replace(
        LLAMA, rotary_scaling=Yarn(8.0, 64, 1.2), description=ModelDescription(feed_forward=FeedForward(bias=True))
    ),
}
POLICIES = ("full", "rocketkv", "snapkv++", "hybrid", "snapkv-gqa")
EVICTING = ("rocketkv", "snapkv++", "snapkv-gqa")
"""Policies that evict by an observation window."""
QUERY_AGNOSTIC = ("keydiff", "expected-attention", "expected-attention-hybrid")
TYPES = {
    "uint8": TensorProto.UINT8,
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "int8": TensorProto.INT8,
}


def resolve(policy: str, model: ModelConfig = LLAMA, **changes) -> PolicyParameters:
    settings = {"token_budget": 32, "max_input_len": 250, "max_output_len": 8}
    if policy in EVICTING:
        settings |= {"window": 8, "pool_kernel": 7}
    return policies.resolve(policy, model=model, **{**settings, **changes})


def open_session(model, directory: Path | None = None):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if directory is not None:
        key = "session.model_external_initializers_file_folder_path"
        options.add_session_config_entry(key, str(directory))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class SingleNode:
    """One kvc operator as a model; inputs take their types and ranks from the arrays."""

    def __init__(self, body, attributes: dict[str, int]) -> None:
        self.body, self.attributes = body, attributes
        self._sessions: dict[tuple[str, ...], object] = {}

    def model(self, types: tuple[str, ...]):
        emit = Emitter()
        outputs = list(self.body.output)
        inputs = {name: name for name in self.body.input}
        OPERATORS[self.body.name].call(emit, inputs, {name: name for name in outputs}, **self.attributes)
        inputs = [
            helper.make_tensor_value_info(name, TYPES[type_], None)
            for name, type_ in zip(self.body.input, types, strict=True)
        ]
        graph = helper.make_graph(emit.nodes, "one", inputs, [helper.make_empty_tensor_value_info(o) for o in outputs])
        imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(KVC_DOMAIN, 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION, functions=[self.body])

    def session(self, types: tuple[str, ...]):
        return open_session(self.model(types))

    def named(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run it on the arrays of its inputs' names; others are ignored."""
        return self(*(arrays[name] for name in self.body.input))

    def __call__(self, *arrays):
        types = tuple(str(array.dtype) for array in arrays)
        if types not in self._sessions:
            self._sessions[types] = self.session(types)
        results = self._sessions[types].run(None, dict(zip(self.body.input, arrays, strict=True)))
        return dict(zip(self.body.output, results, strict=True))


@dataclass
class SmallEngine:
    """The graphs of a small random model, with every index list exposed."""

    model: ModelConfig
    parameters: PolicyParameters
    directory: Path
    precision: str
    state: tuple[StateTensor, ...]
    prefill_model: onnx.ModelProto
    decode_model: onnx.ModelProto
    extend_model: onnx.ModelProto | None = None

    def __post_init__(self) -> None:
        models = {"prefill": self.prefill_model, "decode": self.decode_model, "extend": self.extend_model}
        self._sessions = {
            name: open_session(expose(model, index_lists(model)), self.directory)
            for name, model in models.items()
            if model is not None
        }

    def prefill(self, prompts: list[np.ndarray]) -> dict[str, np.ndarray]:
        lengths = np.array([len(prompt) for prompt in prompts])
        padded = np.full((len(prompts), -(-lengths.max() // 128) * 128), 3)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        return self._run("prefill", input_ids=padded, prompt_lengths=lengths)

    def decode(self, tokens, positions, cache_lengths, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """State tensors come back under their input names."""
        feeds = {tensor.name: state[tensor.name] for tensor in self.state if tensor.in_step}
        result = self._run("decode", token=tokens, positions=positions, cache_lengths=cache_lengths, **feeds)
        rest = {tensor.name: state[tensor.name] for tensor in self.state if not tensor.in_step}
        return {name.replace("_out.", "."): value for name, value in result.items()} | rest

    def extend(self, blocks: list[np.ndarray], positions, cache_lengths, state) -> dict[str, np.ndarray]:
        """One turn; the new cache_lengths and the state tensors come back under their input names."""
        lengths = np.array([len(block) for block in blocks])
        padded = np.full((len(blocks), lengths.max()), 3)
        for row, block in zip(padded, blocks, strict=True):
            row[: len(block)] = block
        feeds = {tensor.name: state[tensor.name] for tensor in self.state}
        places = {"lengths": lengths, "positions": np.asarray(positions), "cache_lengths": cache_lengths}
        result = self._run("extend", input_ids=padded, **places, **feeds)
        return {name.replace("_out", ""): value for name, value in result.items()}

    def _run(self, graph: str, **feeds) -> dict[str, np.ndarray]:
        session = self._sessions[graph]
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, feeds), strict=True))


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def prompts_of(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(2, LLAMA.vocab_size, length) for length in lengths]


def make_small_engine(
    directory: Path, policy, precision="fp32", model=LLAMA, *, prefill=build_prefill, decode=build_decode, turns=False,
    all_logits=False, **changes,
) -> SmallEngine:  # fmt: skip
    """`policy` is a name or resolved parameters; `prefill` and `decode` replace the builders; `turns` adds extend."""
    parameters = policy if isinstance(policy, PolicyParameters) else resolve(policy, model, **changes)
    path = directory / "weights.safetensors"
    write_weights(model, RandomWeights(model, 0), path, weights=precision, length=parameters.max_sequence_len)
    weights = GraphWeights(path)
    state = state_tensors(model, parameters, weights.dtype, turns=turns)
    graphs = [prefill(model, parameters, weights=weights, **({"turns": True} if turns else {}))]
    graphs.append(decode(model, parameters, weights=weights))
    if turns:
        graphs.append(build_extend(model, parameters, weights=weights, all_logits=all_logits))
    return SmallEngine(model, parameters, directory, precision, state, *graphs)
