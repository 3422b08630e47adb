"""A build whose settings are complete, the numbers that they lead to, and the weight formats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from kvc_trt import policies
from kvc_trt.config import DERIVED_NUMBERS, BuildConfig
from kvc_trt.engine.resolution.head_pattern import read_head_pattern
from kvc_trt.engine.resolution.model_choice import ModelChoice
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.presets import RecommendedPolicy
from kvc_trt.models.weights import count_parameters
from kvc_trt.sizes import readable_size
from kvc_trt.validation import validated

USABLE_MEMORY = 0.8
"""The largest share of this machine's memory that weights may take."""
WeightKind = Literal["fp32", "fp16", "bf16", "fp8", "int8", "int4", "keep"]
BYTES_PER_WEIGHT: dict[str, float] = {
    "fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1 + 2 / 32, "int4": 0.5 + 2 / 32, "keep": 1 + 2 / 32,
}  # fmt: skip
"""Bytes per weight of each format. Quantised matrices have one float16 scale per block of 32;
kept blocks are counted as the largest that there are."""
_OWN_KIND: dict[str, WeightKind] = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class ResolvedBuild:
    """A resolved build: `config` has every setting, so building it again gives the same engine."""

    config: BuildConfig
    model: ModelConfig
    """The model, with the dtype in which the engine computes."""

    @cached_property
    def parameters(self) -> PolicyParameters:
        """The policy's numbers, which follow from the configuration and the model; InputError for invalid ones."""
        return resolve_parameters(self.config, self.model)

    def changed(self, config: BuildConfig, model: ModelConfig | None = None) -> ResolvedBuild:
        """Return the build with these in place of its own; the parameters are kept where nothing new decides on them.

        None of the parameters depends on the model's dtype.
        """
        found = ResolvedBuild(config, model or self.model)
        same_model = replace(found.model, dtype=self.model.dtype) == self.model
        if same_model and _policy_settings(config) == _policy_settings(self.config):
            vars(found)["parameters"] = self.parameters  # where cached_property looks
        return found

    @property
    def dtype(self) -> str:
        """Dtype of activations and cache: float16 for fp16 weights, bfloat16 for bf16 and fp8, float32 otherwise."""
        return compute_dtype(self.config.weights)


def compute_dtype(weights: str) -> str:
    """Return the dtype of activations and cache for a weight format."""
    return {"fp16": "float16", "bf16": "bfloat16", "fp8": "bfloat16"}.get(weights, "float32")


def recommended(config: BuildConfig, choice: ModelChoice) -> RecommendedPolicy | None:
    """Return the model preset's recommendation for a build that names neither policy nor token budget; None for others.

    The recommendation was measured at one token budget; another budget may be too small for it, since it has to hold
    the answer too. It was measured with questions of one prompt, so a build for conversations takes none.
    """
    named = "policy" in config.model_fields_set or config.token_budget is not None
    return None if named or config.max_conversation_len is not None else choice.recommended


def default_taken(config: BuildConfig, choice: ModelChoice) -> str | None:
    """Return a sentence that says which policy a build takes that names none, and why; None if it names one."""
    if "policy" in config.model_fields_set:
        return None
    if (found := recommended(config, choice)) is not None:
        said = f"policy {found.policy}, because none is named: {found.why}"
        given = [name for name in DERIVED_NUMBERS if getattr(config, name, None) is not None]
        measured = f"; that was measured with {found.prompt_budget} tokens of a prompt and not with this "
        return said + measured + " and ".join(given) if given else said
    reason = "no policy is recommended for this model; kvc-trt tune chooses by your own questions"
    if (other := choice.recommended) is not None:
        where = "for one prompt at a time" if config.max_conversation_len is not None else "where no budget is named"
        reason = f"{other.policy} is recommended {where}; --policy full keeps everything"
    return f"policy {config.policy}, because none is named: {reason}"


def with_defaults(config: BuildConfig, choice: ModelChoice) -> BuildConfig:
    """Fill in the model's defaults for what the user left out, without those that the policy does not use."""
    given = config.model_dump(include=config.model_fields_set, exclude_none=True)
    settings = dict(choice.defaults)
    if (found := recommended(config, choice)) is not None:
        answer = given.get("max_output_len", settings["max_output_len"])
        settings |= {"policy": found.policy, "token_budget": found.token_budget(answer)}
        settings |= {} if found.pool_kernel is None else {"pool_kernel": found.pool_kernel}
    policy = given.get("policy", settings.get("policy", config.policy))
    overrides = {name: value for name, value in settings.items() if name in (*DERIVED_NUMBERS, "dense_until")}
    others = {name: value for name, value in settings.items() if name not in overrides}
    settled = policies.fixed(policy)
    free = {name: value for name, value in overrides.items() if name not in settled}
    defaults = {**others, **policies.applicable(policy, free)}
    return validated(BuildConfig, {**defaults, **given}, f"{choice.name} with its defaults")


def for_every_policy(config: BuildConfig, choice: ModelChoice) -> BuildConfig:
    """Fill in the defaults that hold whatever the policy: a recommended policy's budget is not among them."""
    return with_defaults(config.model_copy(update={"policy": config.policy}), choice)


def check_cosines(config: BuildConfig, model: ModelConfig) -> None:
    """Raise InputError for recorded cosines of another number of layers, and where nothing is divided by them."""
    cosines, layers = config.layer_cosines, model.num_hidden_layers
    if cosines is None:
        return
    if config.layer_budget != "squeeze":
        raise InputError("layer_cosines has no use without --layer-budget squeeze", hint="--layer-budget squeeze")
    if len(cosines) != layers:
        raise InputError(f"layer_cosines has {len(cosines)} numbers; expected {layers}, one per layer")


def resolve_parameters(config: BuildConfig, model: ModelConfig) -> PolicyParameters:
    """Derive the policy's numbers. `config` has its defaults; `dense_until: auto` counts as not given here.

    Raises InputError for a length the model cannot serve (positions, sliding window) and for invalid numbers.
    """
    assert config.max_input_len is not None
    assert config.max_output_len is not None
    pattern = None if config.head_pattern is None else read_head_pattern(Path(config.head_pattern))
    return policies.resolve(config.policy, model=model, head_scores=pattern, **_numbers(config))


def _numbers(config: BuildConfig) -> dict[str, Any]:
    """Return the numbers that the parameters of the policy follow from."""
    return {
        "token_budget": config.token_budget,
        "max_input_len": config.max_input_len,
        "max_output_len": config.max_output_len,
        "split": config.split,
        "dense_until": None if config.dense_until == "auto" else config.dense_until,
        **config.overrides(),
    }


def _policy_settings(config: BuildConfig) -> tuple[object, ...]:
    """Return everything of the configuration that decides on the parameters of the policy."""
    pattern = None if config.head_pattern is None else Path(config.head_pattern).absolute()
    return config.policy, pattern, _numbers(config)


def checkpoint_weights(choice: ModelChoice) -> WeightKind:
    """Return the default weight format for a GPU: the checkpoint's own type, fp16 for an fp32 checkpoint."""
    return _OWN_KIND.get(choice.config.dtype, "fp16")


def host_weights(choice: ModelChoice) -> WeightKind:
    """Return fp32, the default for a CPU; UnsupportedEnvironment, suggesting int8 or int4, if memory is too small."""
    import psutil

    memory = psutil.virtual_memory().total
    if weight_bytes(choice.config, "fp32") <= USABLE_MEMORY * memory:
        return "fp32"
    sizes = {kind: readable_size(weight_bytes(choice.config, kind)) for kind in ("fp32", "int8", "int4")}
    raise UnsupportedEnvironment(
        f"{choice.name} in fp32 needs {sizes['fp32']} for its weights; "
        f"this machine has {readable_size(memory)}, of which {USABLE_MEMORY:.0%} may be used",
        hint=f"--weights int8 ({sizes['int8']}) or --weights int4 ({sizes['int4']})",
    )


def weight_bytes(model: ModelConfig, weights: str) -> int:
    """Return the bytes of the weight file; int4 has the embedding in int8, fp8 the embedding and head in 16 bits."""
    count = count_parameters(model)
    embedding = model.vocab_size * model.hidden_size
    if weights == "fp8":
        wide = embedding if model.tie_word_embeddings else 2 * embedding
        return int(wide * BYTES_PER_WEIGHT["bf16"] + (count - wide) * BYTES_PER_WEIGHT["fp8"])
    if weights not in ("int8", "int4"):
        return int(count * BYTES_PER_WEIGHT[weights])
    return int(embedding * BYTES_PER_WEIGHT["int8"] + (count - embedding) * BYTES_PER_WEIGHT[weights])
