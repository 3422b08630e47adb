"""The policies a user can name. A new method is one file beside this one, and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from kvc_trt.errors import InputError, did_you_mean
from kvc_trt.methods import (
    duo_attention,
    exact_topk,
    full,
    heavy_hitters,
    hybrid,
    pyramidkv,
    quest,
    quest_matched,
    rocketkv,
    sliding_window,
    snapkv,
    snapkv_gqa,
    snapkv_plus_plus,
    sparq,
    streaming_llm,
)
from kvc_trt.methods.layer_budget import SETTINGS, with_layer_budget
from kvc_trt.methods.request import OVERRIDES, Request, check_request

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.methods.parameters import PolicyParameters
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.reference import Compacted, LayerCache, Selection


class Method(Protocol):
    """What every method's module offers: three pure functions and how it introduces itself."""

    SUMMARY: str
    SOURCE: str
    PROMPT_EVICTION: str
    DECODE_SELECTION: str
    OVERRIDES: tuple[str, ...]

    def resolve(self, request: Request) -> PolicyParameters:
        """All constants of the policy for one engine."""

    def compact(
        self, q_window: Tensor, keys: Tensor, values: Tensor, prompt_lengths: Tensor, parameters: PolicyParameters
    ) -> Compacted:
        """What is left of a prompt's cache, [B,H,W,D] queries, [B,G,S,D] keys and values."""

    def select(self, query: Tensor, cache: LayerCache, parameters: PolicyParameters) -> Selection:
        """Attention of one step [B,H,D] over a cache that holds the current token; what was read, and what stays."""


class _Entry(NamedTuple):
    module: object
    note: str = ""
    split: str | None = None
    pool_kernel: int | None = None

    @property
    def method(self) -> Method:
        return cast("Method", self.module)


_POLICIES = {
    "full": _Entry(full),
    "rocketkv": _Entry(rocketkv),
    "rocketkv-v1": _Entry(rocketkv, "rocketkv with the even split of the paper's first version", split="even"),
    "rocketkv-v2": _Entry(rocketkv, "rocketkv with pool kernel 63, as released", split="adaptive", pool_kernel=63),
    "snapkv++": _Entry(snapkv_plus_plus),
    "hybrid": _Entry(hybrid),
    "snapkv-gqa": _Entry(snapkv_gqa),
    "snapkv": _Entry(snapkv),
    "pyramidkv": _Entry(pyramidkv),
    "quest": _Entry(quest),
    "quest-matched": _Entry(quest_matched),
    "sparq": _Entry(sparq),
    "h2o": _Entry(heavy_hitters),
    "streaming-llm": _Entry(streaming_llm),
    "sliding-window": _Entry(sliding_window),
    "duo-attention": _Entry(duo_attention),
    "exact-topk": _Entry(exact_topk),
    "exact-topk-group": _Entry(exact_topk, "oracle: exact-topk with one list for the heads of a group"),
}


class Description(NamedTuple):
    """One policy as `kvc-trt policies` lists it."""

    name: str
    summary: str
    source: str
    prompt_eviction: str
    decode_selection: str
    overrides: tuple[str, ...]
    """What a user may fix by hand."""


def resolve(
    policy: str, *, model: ModelConfig, token_budget: int | None, max_input_len: int, max_output_len: int,
    split: str | float = "adaptive", **overrides: Any,
) -> PolicyParameters:  # fmt: skip
    """Derive every constant of a policy from a token budget and the longest request an engine will serve.

    Overrides (those that `describe` lists for the policy, and layer_budget, squeeze_share, layer_budgets) fix one
    setting by hand; None, and "auto" for pool_kernel and dense_until, leave it derived. Counts are tokens. Pure.
    InputError for an unknown policy or override (with the nearest name), one that this policy has no use for, and any
    value that cannot be right.
    """
    entry = _entry(policy)
    given = _given(overrides)
    for name in given:
        if name not in (*entry.method.OVERRIDES, *SETTINGS):
            taken = ", ".join(_setting(known) for known in entry.method.OVERRIDES)
            raise InputError(f"policy {policy} has no {_setting(name)}", hint=f"it takes {taken}")
    given = {**fixed(policy), **given}
    if entry.split is not None and split not in (entry.split, "adaptive"):
        raise InputError(f"policy {policy} fixes the split to {entry.split}, found {split!r}", hint="--policy rocketkv")
    request = Request(policy, model, token_budget, max_input_len, max_output_len, entry.split or split, given)
    check_request(request)
    return with_layer_budget(entry.method.resolve(request), request)


def _setting(name: str) -> str:
    """What a user calls an override: scores of heads are given as a file."""
    return "head_pattern" if name == "head_scores" else name


def applicable(policy: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The given ones that this policy has a use for: how a model's defaults are offered to any policy."""
    names = _entry(policy).method.OVERRIDES
    return {name: value for name, value in overrides.items() if name in names}


def fixed(policy: str) -> dict[str, int]:
    """What a policy's name settles: a model's defaults do not change it, only a user does."""
    kernel = _entry(policy).pool_kernel
    return {} if kernel is None else {"pool_kernel": kernel}


def method(parameters: PolicyParameters) -> Method:
    """The functions of the policy that these parameters were resolved for."""
    return _entry(parameters.policy).method


def available() -> list[tuple[str, str, str]]:
    """(name, one line, source) of every policy, in the order a user should read them."""
    return [(one.name, one.summary, one.source) for one in describe()]


def describe() -> list[Description]:
    """Every policy with its composition, in the order a user should read them."""
    table = [(name, entry.note, entry.method) for name, entry in _POLICIES.items()]
    return [
        Description(name, note or m.SUMMARY, m.SOURCE, m.PROMPT_EVICTION, m.DECODE_SELECTION, m.OVERRIDES)
        for name, note, m in table
    ]


def _given(overrides: Mapping[str, Any]) -> dict[str, Any]:
    for name in overrides:
        if name not in OVERRIDES:
            hint = f"known: {', '.join(OVERRIDES)}"
            raise InputError(f"unknown policy override {name!r}{did_you_mean(name, OVERRIDES)}", hint=hint)
    derived = (("pool_kernel", "auto"), ("dense_until", "auto"))
    return {name: value for name, value in overrides.items() if value is not None and (name, value) not in derived}


def _entry(policy: str) -> _Entry:
    if policy not in _POLICIES:
        raise InputError(
            f"unknown policy {policy!r}{did_you_mean(policy, _POLICIES)}", hint="kvc-trt policies lists them"
        )
    return _POLICIES[policy]
