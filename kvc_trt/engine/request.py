"""From what a user asked to a build with nothing left open: every number derived, every default taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvc_trt import policies
from kvc_trt.config import DERIVED_NUMBERS, BuildConfig
from kvc_trt.engine.model_choice import ModelChoice, ModelSource, is_directory
from kvc_trt.engine.supported import check_supported
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.methods.head_pattern import read_head_pattern
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.weights import count_parameters
from kvc_trt.schema import validated

USABLE_MEMORY = 0.8
"""Share of this machine's memory that weights may fill."""
WeightKind = Literal["fp32", "fp16", "bf16", "fp8", "int8", "int4"]
BYTES_PER_WEIGHT: dict[str, float] = {
    "fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1 + 4 / 32, "int4": 0.5 + 4 / 32,
}  # fmt: skip
"""Quantised matrices carry one float32 scale per block of 32."""
WEIGHTS_OF: dict[str, tuple[WeightKind, ...]] = {
    "onnxruntime": ("fp32", "fp16", "int8", "int4"),
    "tensorrt": ("bf16", "fp16", "fp32", "fp8"),
    "tensorrt-llm": ("bf16", "fp16", "fp32"),
    "torch": ("bf16", "fp16", "fp32"),
}
"""Kinds of weights that each backend runs."""
_NO_BFLOAT16 = "ONNX Runtime computes no bfloat16 on a CPU"
_QUANTISED = "weights are quantised for ONNX Runtime, whose operator no other backend has"
_FP8 = "TensorRT alone multiplies matrices in fp8; any other kind is made of them when an fp8 checkpoint is read"
_WHY_NOT = {"bf16": _NO_BFLOAT16, "int8": _QUANTISED, "int4": _QUANTISED, "fp8": _FP8}
_OWN_TYPE: dict[str, WeightKind] = {"bfloat16": "bf16", "float16": "fp16"}
MeasureBreakEven = Callable[[ModelConfig, PolicyParameters, str], int]


@dataclass(frozen=True)
class Request:
    """One build, resolved: `config` names every setting, so building it again gives the same engine."""

    config: BuildConfig
    model: ModelConfig
    """With the dtype that the engine computes in."""
    parameters: PolicyParameters

    @property
    def dtype(self) -> str:
        """Activations and cache: float16 for fp16 weights, bfloat16 for bf16 and fp8, float32 otherwise."""
        return compute_dtype(self.config.weights)


def compute_dtype(weights: str) -> str:
    """Return the dtype of activations and cache that goes with a kind of weights."""
    return {"fp16": "float16", "bf16": "bfloat16", "fp8": "bfloat16"}.get(weights, "float32")


def with_defaults(config: BuildConfig, choice: ModelChoice) -> BuildConfig:
    """Fill what the user left out from the model's defaults; a default that the policy has no use for is dropped."""
    given = config.model_dump(include=config.model_fields_set, exclude_none=True)
    policy = given.get("policy", choice.defaults.get("policy", config.policy))
    overrides = {name: value for name, value in choice.defaults.items() if name in (*DERIVED_NUMBERS, "dense_until")}
    others = {name: value for name, value in choice.defaults.items() if name not in overrides}
    settled = policies.fixed(policy)
    free = {name: value for name, value in overrides.items() if name not in settled}
    defaults = {**others, **policies.applicable(policy, free)}
    return validated(BuildConfig, {**defaults, **given}, f"{choice.name} with its defaults")


def resolve_parameters(config: BuildConfig, model: ModelConfig) -> PolicyParameters:
    """Derive the policy's numbers. `config` has its defaults; `dense_until: auto` counts as not given here.

    Raises InputError for a length the model cannot serve (positions, sliding window) and for impossible numbers.
    """
    assert config.max_input_len is not None
    assert config.max_output_len is not None
    return policies.resolve(
        config.policy,
        model=model,
        token_budget=config.token_budget,
        max_input_len=config.max_input_len,
        max_output_len=config.max_output_len,
        split=config.split,
        dense_until=config.dense_until,
        head_scores=None if config.head_pattern is None else read_head_pattern(Path(config.head_pattern)),
        **config.overrides(),
    )


def resolve(
    config: BuildConfig,
    choice: ModelChoice,
    backend: str,
    *,
    recorded: Mapping[str, Any] | None = None,
    measure_break_even: MeasureBreakEven,
) -> Request:
    """Resolve a build completely.

    `recorded` are the parameters of an engine whose configuration is replayed unchanged: where this version would
    derive another number, the recorded one is set by hand.
    """
    config = with_defaults(config, choice)
    config = config.model_copy(update={"backend": backend})
    parameters = resolve_parameters(config, choice.config)
    if config.weights == "auto":
        stored = choice if config.random_weights is None else dataclasses.replace(choice, directory=None)
        config = config.model_copy(update={"weights": default_weights(stored, backend)})
    check_backend_settings(config)
    check_supported(parameters, choice.config.num_hidden_layers, backend)
    config = _pinned(config, parameters, recorded or {})
    if config.dense_until == "auto":
        measured = None
        if parameters.reads_a_part:
            measured = measure_break_even(choice.config, parameters, compute_dtype(config.weights))
        config = config.model_copy(update={"dense_until": measured})
    model = dataclasses.replace(choice.config, dtype=compute_dtype(config.weights))
    return Request(config, model, resolve_parameters(config, choice.config))


def for_source(request: Request, choice: ModelChoice, source: ModelSource) -> Request:
    """Return the request for the weights that were really opened: their configuration, paths and commit."""
    config = request.config
    update: dict[str, Any] = {} if source.commit is None else {"revision": source.commit}
    if config.checkpoint is not None:
        update["checkpoint"] = str(choice.directory)
    elif choice.hugging_face_id is None and choice.directory is not None and is_directory(config.model):
        update["model"] = str(choice.directory)
    if config.head_pattern is not None:
        update["head_pattern"] = str(Path(config.head_pattern).absolute())
    config = config.model_copy(update=update)
    model = dataclasses.replace(choice.config, dtype=request.dtype)
    return Request(config, model, resolve_parameters(config, model))


def check_backend_settings(config: BuildConfig) -> None:
    """Raise InputError for settings that the build's backend has no use for; nothing is dropped silently."""
    kinds = WEIGHTS_OF[config.backend]
    if config.weights not in kinds:
        raise InputError(
            f"--weights {config.weights}: {_WHY_NOT[config.weights]}; "
            f"backend {config.backend} takes {', '.join(kinds)}",
            hint=f"--weights {kinds[0]}",
        )
    if config.compatibility is not None and config.backend != "tensorrt":
        raise InputError(f"compatibility: {config.compatibility} is for --backend tensorrt, found {config.backend}")


def default_weights(choice: ModelChoice, backend: str = "onnxruntime") -> WeightKind:
    """The checkpoint's own type on a GPU (fp16 for an fp32 checkpoint; fp8 where TensorRT runs it); elsewhere fp32.

    UnsupportedEnvironment, naming int8 and int4, where fp32 does not fit this machine's memory.
    """
    if backend == "tensorrt" and choice.quantised:
        return "fp8"
    if backend != "onnxruntime":
        return _OWN_TYPE.get(choice.config.dtype, "fp16")
    import psutil

    memory = psutil.virtual_memory().total
    if weight_bytes(choice.config, "fp32") <= USABLE_MEMORY * memory:
        return "fp32"
    sizes = {kind: weight_bytes(choice.config, kind) / 1e9 for kind in WEIGHTS_OF["onnxruntime"]}
    raise UnsupportedEnvironment(
        f"{choice.name} in fp32 needs {sizes['fp32']:.0f} GB for its weights; "
        f"this machine has {memory / 1e9:.0f} GB, of which {USABLE_MEMORY:.0%} may be used",
        hint=f"--weights int8 ({sizes['int8']:.0f} GB) or --weights int4 ({sizes['int4']:.0f} GB)",
    )


def weight_bytes(model: ModelConfig, weights: str) -> int:
    """Return the size of the weight file; quantised models keep their embedding in 16 bits, in fp8 the head too."""
    count = count_parameters(model)
    embedding = model.vocab_size * model.hidden_size
    if weights == "fp8":
        wide = embedding if model.tie_word_embeddings else 2 * embedding
        return int(wide * BYTES_PER_WEIGHT["bf16"] + (count - wide) * BYTES_PER_WEIGHT["fp8"])
    if weights not in ("int8", "int4"):
        return int(count * BYTES_PER_WEIGHT[weights])
    matrices = count if model.tie_word_embeddings else count - embedding
    return int(embedding * BYTES_PER_WEIGHT["fp16"] + matrices * BYTES_PER_WEIGHT[weights])


def _pinned(config: BuildConfig, derived: PolicyParameters, recorded: Mapping[str, Any]) -> BuildConfig:
    """Set by hand what an engine recorded and this version would derive differently."""
    known = {name: recorded[name] for name in DERIVED_NUMBERS if name in recorded}
    different = {name: value for name, value in known.items() if value != getattr(derived, name)}
    pins = policies.applicable(config.policy, different)
    return validated(BuildConfig, {**config.stored(), **pins}, "recorded parameters") if pins else config
