"""Random models of every supported family, ours and transformers', from one set of weights."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvc_trt import policies
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.rope import rotary_tables
from kvc_trt.models.sources.hugging_face import parse_config
from kvc_trt.reference.layers import rms_norm
from kvc_trt.reference.model.decoder import ReferenceCache, ReferenceDecoder

TINY: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "llama-tied-biased": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True,
        "attention_bias": True,
    },
    "llama3.1": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_scaling": LLAMA3, "rope_theta": 500000.0,
    },
    "longchat": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 6, "head_dim": 8,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "llama-yarn": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": True, "rope_scaling": YARN,
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "mistral-v0.1": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "head_dim": 8},
    "qwen2-yarn": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "head_dim": 8, "rope_scaling": YARN,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False},
    "qwen3-yarn": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "rope_scaling": YARN,
    },
}  # fmt: skip


class DictWeights:
    """Tensors of a state dict as a WeightSource."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = {name: tensor.detach().numpy() for name, tensor in tensors.items()}
        self.reads = 0

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        return str(self._tensors[name].dtype)

    def read(self, name: str) -> np.ndarray[Any, Any]:
        self.reads += 1
        return self._tensors[name]

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        return self._tensors[name][start:stop]

    def fingerprint(self) -> str:
        return "test"


@dataclass
class Pair:
    """One model twice."""

    config: ModelConfig
    weights: DictWeights
    hugging_face: Any

    def decoder(
        self, policy: str, budget: int, inputs: int, outputs: int, dtype: torch.dtype = torch.float32,
        resident: bool = True, **overrides: int,
    ) -> ReferenceDecoder:  # fmt: skip
        lengths = {"max_input_len": inputs, "max_output_len": outputs}
        parameters = policies.resolve(policy, model=self.config, token_budget=budget, **lengths, **overrides)
        method = policies.method(parameters)
        return ReferenceDecoder(
            self.config, self.weights, method=method, parameters=parameters, dtype=dtype, resident=resident
        )


def make_exact(pair: Pair, length: int = 1024) -> Any:
    """transformers' model in float64. Its norms would compute in float32 whatever they are given, and its cosines
    differ from numpy's in the last float32 bit: both would hide an error of ours, so both are replaced."""
    model = pair.hugging_face.double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(rms_norm, weight=module.weight, epsilon=module.variance_epsilon)
    factor = getattr(pair.config.rotary_scaling, "attention_factor", 1.0)  # ours is in the query
    cos, sin = (torch.from_numpy(table).double().repeat(1, 2) * factor for table in rotary_tables(pair.config, length))
    model.model.rotary_emb.forward = lambda x, position_ids, **_: (cos[position_ids], sin[position_ids])
    pair.weights = DictWeights({n: torch.from_numpy(pair.weights.read(n)) for n in pair.weights.names()})
    return model


def build(mapping: dict[str, Any], seed: int = 0) -> Pair:
    """transformers' model of a configuration, random weights of a scale that keeps softmaxes away from uniform."""
    import transformers

    transformers.logging.set_verbosity_error()
    name = mapping["architectures"][0].removesuffix("ForCausalLM")
    settings = {
        key: value for key, value in mapping.items() if key not in ("architectures", "model_type", "torch_dtype")
    }
    hf_config = getattr(transformers, f"{name}Config")(**settings, attn_implementation="sdpa", dtype="float32")
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(hf_config)
    model = model.to_empty(device="cpu").eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            centre = 1.0 if "norm" in parameter_name else 0.0
            parameter.data.normal_(centre, 0.1, generator=generator)
        else:
            limit = 2.5 / parameter.shape[1] ** 0.5  # uniform: drawn in a third of the time
            parameter.data.uniform_(-limit, limit, generator=generator)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(hf_config)
    weights = {
        key: value
        for key, value in model.state_dict().items()
        if "lm_head" not in key or not settings["tie_word_embeddings"]
    }
    return Pair(parse_config(mapping, "test"), DictWeights(weights), model)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def family() -> Callable[..., Pair]:
    """family(name, **changes): a tiny random model of a family."""
    return lambda name, **changes: build({**TINY, **FAMILIES[name], **changes})


@pytest.fixture
def true_size() -> Iterator[Callable[[dict[str, Any]], Pair]]:
    """A model from any config.json mapping; memory is given back afterwards."""
    yield build
    gc.collect()


Stepper = Callable[[ReferenceDecoder, Tensor, Tensor, Tensor], tuple[list[Tensor], ReferenceCache]]


@pytest.fixture
def teacher_forced() -> Stepper:
    """Logits [B,vocab] after prefill and after each of `following` [B,steps]."""

    def run(
        decoder: ReferenceDecoder, ids: Tensor, lengths: Tensor, following: Tensor
    ) -> tuple[list[Tensor], ReferenceCache]:
        first, cache = decoder.prefill(ids, lengths)
        return [first, *(decoder.decode(column, cache) for column in following.T)], cache

    return run


@pytest.fixture
def exact() -> Callable[[Pair], Any]:
    """transformers' model in float64, exact throughout."""
    return make_exact
