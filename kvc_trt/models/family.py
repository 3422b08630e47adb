"""A family of decoders: how its config.json and its weights give the parts of `ModelDescription`.

A family is one file in `kvc_trt/models/families`, found by the `Family` that it defines. Its `Fields` name every field
of config.json that changes what the model computes; those that do not are listed as harmless, and a test walks the
configuration classes of `transformers` for others.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field

import kvc_trt.models.families
from kvc_trt.models.config import Activation, ModelConfig, ModelDescription
from kvc_trt.models.family_weights import Rows
from kvc_trt.models.fields.rotary import Base, Length
from kvc_trt.models.gguf.keys import GgufKeys
from kvc_trt.models.weights import WeightSource
from kvc_trt.validation import ForeignSchema

DType = Literal["float32", "float16", "bfloat16"]
Count = Annotated[int, Field(ge=1, le=1024)]
LayerType = Literal["full_attention", "sliding_attention"]
ActivationName = Literal["silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu"]
ACTIVATIONS: Mapping[ActivationName, Activation] = {
    "silu": "silu", "gelu": "gelu", "relu": "relu",
    "gelu_new": "gelu-tanh", "gelu_fast": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh",
}  # fmt: skip
"""Names of `hidden_act` -> the activations that are computed; the last name of an activation is the one written."""

SUFFIX = "ForCausalLM"
"""How the architectures of decoders end."""
HARMLESS = frozenset({
    "_name_or_path", "add_cross_attention", "attention_dropout", "chunk_size_feed_forward", "id2label",
    "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "model_type", "output_attentions",
    "output_hidden_states", "pad_token_id", "problem_type", "return_dict", "transformers_version", "use_cache",
})  # fmt: skip
"""Fields of every configuration that do not change the logits of a trained decoder."""
UNDECLARED: Mapping[str, Any] = {
    "is_causal": True,
    "layer_types": None,
    "sliding_window": None,
    "attention_chunk_size": None,
    "kv_sharing_modes": None,
    "per_layer_config": None,
}
"""Fields that `transformers` reads from any configuration, declared by its class or not -> the value without effect.
`layer_types` has no effect either if every layer has full attention."""

WHY_NOT: Mapping[str, str] = {
    "layer_types": "its layers are all of one kind",
    "attention_chunk_size": "no part attends within chunks",
}
"""Fields of `UNDECLARED` -> the reason why another value is refused, where the field does not say it."""


class RefusedClass(NamedTuple):
    """Why a class has no family."""

    expected: str
    why: str


REFUSED: Mapping[str, RefusedClass] = {
    "Gemma4": RefusedClass(
        "layers whose heads are alike",
        "those of Gemma 4 differ in size and number, and some layers reuse keys and values of others",
    ),
    "Ministral3": RefusedClass(
        "another class", "Ministral 3 multiplies queries by a factor that grows with their position, and no part does"
    ),
}
"""The beginning of a class's name -> what no part can express."""


class DecoderFields(ForeignSchema):
    """The fields that all families have; a value that no part can express is refused, never ignored."""

    model_config = ConfigDict(defer_build=True)
    """A process reads the models of one or two families: pydantic's work for the others would be most of its start."""
    architectures: list[str]
    vocab_size: Annotated[int, Field(ge=1, le=1 << 23)]
    hidden_size: Annotated[int, Field(ge=1, le=1 << 18)]
    intermediate_size: Annotated[int, Field(ge=1, le=1 << 20)]
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: int | None = None
    rms_norm_eps: Annotated[float, Field(ge=1e-12, le=0.1)]
    max_position_embeddings: Length
    max_sequence_length: Length = 1
    """The stretched length of Vicuna and LongChat."""
    original_max_position_embeddings: Length | None = None
    dtype: DType | None = None
    torch_dtype: DType | None = None
    rope_theta: Base = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    hidden_act: ActivationName = "silu"
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    quantization_config: Any = None


@dataclass(frozen=True)
class GgufArchitecture:
    """How llama.cpp's converter writes a family."""

    names: tuple[str, ...]
    """Values of `general.architecture`."""
    interleaved: bool = False
    """True if neighbouring rows of queries and keys form the rotary pairs there (2i with 2i+1, not i with i + D/2)."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Fields of config.json, under the names that the family's `fields` have -> keys, besides those of all files."""
    fields: Callable[[GgufKeys], Mapping[str, Any]] = lambda _keys: {}
    """Fields that no key says as config.json does."""
    reads: frozenset[str] = frozenset()
    """Keys that `fields` understands, of those that change a model's results."""
    when: Callable[[GgufKeys], bool] = lambda _keys: True
    """Chooses among families with the same name."""
    yarn: Callable[[GgufKeys], Mapping[str, Any]] = lambda _keys: {}
    """Fields of YaRN's `rope_scaling` that the keys of all files do not say."""
    tensors: Callable[[ModelConfig], Mapping[str, str]] = lambda _config: {}
    """Names of a layer's tensors, without `.weight` or `.bias`, that are not those of `kvc_trt.models.gguf.names`."""
    weights: Callable[[ModelConfig, Container[str]], Mapping[str, Rows]] = lambda _config, _tensors: {}
    """Where tensors of `expected_tensors` are that are not whole tensors of a file, given the names of its own."""
    keeps_spaces: frozenset[str] | None = None
    """Control tokens that keep the spaces behind them, where others of a SentencePiece vocabulary take them away;
    None: all keep them."""


@dataclass(frozen=True)
class BesideImages:
    """A class with the same decoder and a part for images, of whose checkpoints the decoder is read."""

    name: str
    model_type: str
    """The model_type of its `text_config`."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """Transformers' defaults for fields that published files leave out, where `Family.fields` has none or another."""


@dataclass(frozen=True)
class Family:
    """One family. `describe` gets the validated fields and the whole mapping, and returns fields of `ModelConfig`.

    It raises ValueError for a field that it cannot express, with the field's name and the reason.
    """

    architecture: str
    """The class that config.json names."""
    fields: type[DecoderFields]
    describe: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
    harmless: frozenset[str] = frozenset()
    """Fields that do not change the logits, besides `HARMLESS`."""
    fields_of: Callable[[ModelDescription], Mapping[str, Any]] = lambda _description: {}
    """The inverse of `describe`, with which an engine's file is read: the fields of config.json for a description.

    Biases, activation and the share of channels that rotate are known without it."""
    spelling: Mapping[str, str] = field(default_factory=dict)
    """Names of fields in `DecoderFields` -> the family's own, where they differ."""
    absent_kv_heads: int | None = None
    """The number that transformers takes for an absent `num_key_value_heads`. None, and null: as many as heads."""
    absent_head_size: int | None = None
    """The size that transformers takes for an absent `head_dim`. None, and null: hidden size over heads."""
    absent_dtype: DType = "float32"
    """The type of the weights where neither the configuration nor a tensor says it."""
    rotary_fraction: float | None = None
    """The share of a head's channels that rotate where `partial_rotary_factor` is absent; None: always all."""
    interleaved: bool = False
    """True if neighbouring channels form the rotary pairs (2i with 2i+1, not i with i + D/2)."""
    weights: Callable[[ModelConfig], Mapping[str, Rows]] | None = None
    """Where the tensors of `expected_tensors` are that a checkpoint has elsewhere than under the same names."""
    stacks: Callable[[ModelConfig], Mapping[str, Sequence[str]]] | None = None
    """The tensors of a checkpoint that are, one under the other, one of `expected_tensors`, where they are several."""
    other_form: Callable[[WeightSource, ModelConfig], WeightSource] | None = None
    """Reads a checkpoint whose experts are stored in another form, before `stacks`."""
    mxfp4: bool = False
    """True if `other_form` reads experts in MXFP4."""
    beside_images: BesideImages | None = None
    gguf: GgufArchitecture | None = None


def family(architecture: str) -> Family:
    """Return the family of an architecture; KeyError for one that no file defines."""
    return family_of_own_file(architecture) or families()[architecture]


def family_of_own_file(architecture: str) -> Family | None:
    """Return the family from the file that is named like the architecture, without importing the others.

    None where no file is; the family may still be in another one.
    """
    stem = architecture.removesuffix(SUFFIX).lower()
    name = next((one for one in _files() if one.replace("_", "") == stem.replace("_", "")), None)
    return None if name is None else _defined_in(name).get(architecture)


@cache
def families() -> Mapping[str, Family]:
    """Return every family by its architecture."""
    found = {name: one for file in _files() for name, one in _defined_in(file).items()}
    return dict(sorted(found.items()))


def _files() -> list[str]:
    return [found.name for found in pkgutil.iter_modules(kvc_trt.models.families.__path__)]


def _defined_in(file: str) -> Mapping[str, Family]:
    module = import_module(f"{kvc_trt.models.families.__name__}.{file}")
    return {one.architecture: one for one in vars(module).values() if isinstance(one, Family)}
