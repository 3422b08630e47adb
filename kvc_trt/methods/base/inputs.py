"""The user's settings for a policy, checked before any method sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from kvc_trt.errors import InputError
from kvc_trt.methods.base.constants import PoolKind
from kvc_trt.methods.base.decode_selection import DecodeSelection
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.prompt_eviction import PromptEviction
from kvc_trt.models.cache_formats import AUTO, CACHE_FORMATS
from kvc_trt.models.config import ModelConfig, check_length

MINIMUM_TOKEN_BUDGET = 16
DEFAULT_WINDOW = 32

EVERY_POLICY = ("skip_layers", "max_conversation_len", "kv_cache")
EVICTION = ("prompt_budget", "window", "pool_kernel", "pool_kind")
BY_LENGTH = ("by_length",)
SELECTION = ("page_size", "top_r", "top_k", "dense_until", "fp8_bounds", "recent")
OVERRIDES = (
    "prompt_budget", "page_size", "top_r", "top_k", "pool_kernel", "pool_kind", "window", "skip_layers", "sinks",
    "recent", "future_positions", "positions", "reallocate", "layer_budget", "squeeze_share", "squeeze_cap",
    "layer_budgets", "dense_until", "max_conversation_len", "head_scores", "fp8_bounds", "kv_cache", "by_length",
)  # fmt: skip
"""Derived numbers of a policy that can be set by hand, in the order of a plan."""
CHOICES: dict[str, tuple[object, ...]] = {
    "positions": ("original", "cache"),
    "reallocate": (True, False),
    "fp8_bounds": (True, False),
    "kv_cache": tuple(CACHE_FORMATS),
    "by_length": (True, False),
    "pool_kind": get_args(PoolKind),
}


@dataclass(frozen=True)
class PolicyInputs:
    """A token budget for one model at one maximum length, and the numbers set by hand."""

    policy: str
    model: ModelConfig
    token_budget: int | None
    max_input_len: int
    max_output_len: int
    split: str | float = "adaptive"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    share: float | None = None
    """The share of the longest prompt that `token_budget` is, if it was given in percent."""

    @property
    def sequence(self) -> int:
        """S: the longest conversation, at least the longest prompt and everything generated after it."""
        return max(self.value("max_conversation_len", 0), self.max_input_len + self.max_output_len)

    @property
    def budget(self) -> int:
        """Return the token budget; InputError if none was given."""
        if self.token_budget is None:
            raise InputError(f"policy {self.policy} needs a token budget", hint="--token-budget 512")
        return self.token_budget

    def value(self, name: str, default: int) -> int:
        """Return the override of that name, or the derived default."""
        chosen: int = self.overrides.get(name, default)
        return chosen

    def choice(self, name: str, default: Any) -> Any:
        """Like `value`, for settings that are not numbers."""
        return self.overrides.get(name, default)


def constants(
    inputs: PolicyInputs, eviction: PromptEviction, selection: DecodeSelection, *, capacity: int, **numbers: Any
) -> PolicyParameters:
    """Return the constants of a method: `numbers` as given; the others have no effect on it."""
    kv_cache = inputs.choice("kv_cache", AUTO)
    plain = {
        "token_budget": inputs.sequence if inputs.token_budget is None else inputs.token_budget,
        "prompt_budget": inputs.max_input_len,
        "window": DEFAULT_WINDOW,
        "pool_kernel": 1,
        "pool_kind": inputs.choice("pool_kind", "max"),
        "page_size": 1,
        "top_r": inputs.model.head_size,
        "top_k": capacity,
        "dense_until": capacity,
        "skip_layers": inputs.value("skip_layers", 0),
        "max_conversation_len": inputs.value("max_conversation_len", 0),
        "kv_cache": kv_cache,
        "fp8_bounds": inputs.choice("fp8_bounds", selection.pages and kv_cache != AUTO),
    }
    return PolicyParameters(
        policy=inputs.policy,
        prompt_eviction=eviction.name,
        decode_selection=selection.name,
        max_input_len=inputs.max_input_len,
        max_output_len=inputs.max_output_len,
        capacity=capacity,
        split=inputs.split,
        **{**plain, **numbers},
    )


def check_inputs(inputs: PolicyInputs) -> None:
    """Raise InputError, naming the allowed range, for an invalid length, budget, split or override."""
    model = inputs.model
    check_integer("max_output_len", inputs.max_output_len, 1)
    check_length(model, inputs.max_input_len + inputs.max_output_len, inputs.max_output_len)
    _conversation(inputs)
    if inputs.share is not None and inputs.budget < MINIMUM_TOKEN_BUDGET:
        raise InputError(
            f"token_budget is {100 * inputs.share:g}% of the longest prompt's {inputs.max_input_len} tokens, "
            f"{inputs.token_budget}; expected at least {MINIMUM_TOKEN_BUDGET} tokens",
            hint="a larger percentage, or --token-budget in tokens",
        )
    if inputs.token_budget is not None:
        check_integer("token_budget", inputs.token_budget, MINIMUM_TOKEN_BUDGET)
    _split(inputs.split)
    ranges: dict[str, tuple[int, int | None, str]] = {
        "prompt_budget": (1, None, ""),
        "window": (1, None, ""),
        "pool_kernel": (1, None, ""),
        "page_size": (1, inputs.sequence, "the longest sequence"),
        "top_r": (1, model.head_size, "the head size"),
        "top_k": (1, None, ""),
        "dense_until": (0, None, ""),
        "skip_layers": (0, model.num_hidden_layers, "the number of layers"),
        "sinks": (0, None, ""),
        "recent": (0, None, ""),
        "future_positions": (1, None, ""),
    }
    for name, value in inputs.overrides.items():
        if name in ranges:
            check_integer(name, value, *ranges[name])
        elif name in CHOICES and value not in CHOICES[name]:
            raise InputError(f"{name} is {value!r}; expected one of {', '.join(map(str, CHOICES[name]))}")
    _cache_format(inputs.choice("kv_cache", AUTO), model.head_size)
    if inputs.value("pool_kernel", 1) % 2 == 0:
        raise InputError(f"pool_kernel is {inputs.overrides['pool_kernel']}; expected an odd number (it is centred)")


def _cache_format(name: str, head_size: int) -> None:
    """Check that the codes of a vector fill whole bytes."""
    form = CACHE_FORMATS[name]
    if any(vector is not None and head_size * vector.code_bits % 8 for vector in (form.keys, form.values)):
        raise InputError(
            f"kv_cache is {name!r}, which packs two channels into a byte; expected an even head size, "
            f"found {head_size}",
            hint="--kv-cache int8",
        )


def _conversation(inputs: PolicyInputs) -> None:
    """Check the longest conversation: at least one prompt and answer, at most the length that the model was made
    for."""
    if "max_conversation_len" not in inputs.overrides:
        return
    model, least = inputs.model, inputs.max_input_len + inputs.max_output_len
    most = model.max_position_embeddings
    check_integer("max_conversation_len", inputs.overrides["max_conversation_len"], 1)
    if not least <= inputs.overrides["max_conversation_len"] <= max(least, most):
        raise InputError(
            f"max_conversation_len is {inputs.overrides['max_conversation_len']}; expected {least} (the longest prompt "
            f"and answer) to {max(least, most)} (the model's positions)"
        )


def check_integer(name: str, value: object, low: int, high: int | None = None, limit: str = "") -> None:
    """Raise InputError, naming the range, for anything but an integer in it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        expected = f"at least {low}" if high is None else f"in {low}..{high} ({limit})"
        raise InputError(f"{name} is {value!r}; expected an integer {expected}")


def _split(split: object) -> None:
    share = split if isinstance(split, (int, float)) and not isinstance(split, bool) else -1
    if not 0 <= share <= 1 and split not in ("adaptive", "even"):
        raise InputError(f"split is {split!r}; expected adaptive, even, or a number in 0..1")
