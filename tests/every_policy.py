"""The one table of policies for the tests: every policy that engines run, and its forms, with small settings.

Under these settings every policy evicts or selects on a prompt of 200 tokens of `tests.small_model.SMALL`. A test that
holds for any policy takes `EVERY` or `CASES`; one that compares a few takes their names, and so their settings, from
here. A name is that of a policy, or of a policy and one of its forms.
"""

from __future__ import annotations

from typing import Any

from kvc_trt import policies
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from tests.small_model import SMALL

LIMITS = {"token_budget": 48, "max_input_len": 256, "max_output_len": 16}
SETTINGS: dict[str, dict[str, Any]] = {
    "rocketkv": {"pool_kernel": 7},
    "rocketkv-mt": {"window": 16},
    "snapkv": {"token_budget": 96, "window": 8, "pool_kernel": 7},
    "snapkv-gqa": {"token_budget": 96},
    "snapkv++": {"pool_kernel": 7},
    "pyramidkv": {"token_budget": 96, "window": 8, "pool_kernel": 7},
    "keydiff": {"token_budget": 96},
    "expected-attention": {"token_budget": 96},
    "h2o": {"recent": 16},
    "quest": {"skip_layers": 0},
}
"""Settings that a policy needs beyond `LIMITS`: a budget of prompts and answers together is larger than an answer."""
HEAD_SCORES = ((0.9, 0.1), (0.2, 0.8), (0.3, 0.1))
"""Scores of DuoAttention for each layer and KV head: one layer has scores on both sides of the threshold."""
FORMS: dict[str, dict[str, Any]] = {
    "duo-attention, two caches in a layer": {"token_budget": 150, "sinks": 4, "recent": 20, "head_scores": HEAD_SCORES},
    "streaming-llm, positions of the cache": {"positions": "cache"},
    "quest, a skipped layer": {"skip_layers": 1},
    "sparq, without the mean value": {"reallocate": False},
    "quest, bounds in fp8": {"fp8_bounds": True},
    "rocketkv, bounds in fp8": {"fp8_bounds": True},
    "h2o, a budget for each layer": {"layer_budget": "squeeze"},
    "snapkv, averages": {"pool_kind": "avg"},
    "snapkv-gqa, averages": {"pool_kind": "avg"},
}
"""The forms that the tests of every policy compare too: those that no kernel serves."""
OTHER_FORMS: dict[str, dict[str, Any]] = {
    "rocketkv, a skipped layer": {"skip_layers": 1},
    "rocketkv, a budget for each layer": {"layer_budget": "squeeze"},
    "rocketkv, budgets from the prompt": {"layer_budget": "squeeze-online"},
    "snapkv++, budgets from the prompt": {"layer_budget": "squeeze-online"},
    "hybrid, bounds in fp8": {"fp8_bounds": True},
    "expected-attention-hybrid, no sinks": {"sinks": 0},
    "expected-attention-hybrid, a budget for each layer": {"layer_budget": "squeeze"},
    "streaming-llm, a budget for each layer": {"layer_budget": "squeeze"},
    "tova, a budget for each layer": {"layer_budget": "squeeze"},
    "h2o, budgets from the prompt": {"layer_budget": "squeeze-online"},
    "streaming-llm, budgets from the prompt": {"layer_budget": "squeeze-online"},
    "sliding-window, budgets from the prompt": {"layer_budget": "squeeze-online"},
    "tova, budgets from the prompt": {"layer_budget": "squeeze-online"},
    "streaming-llm, positions of the cache and budgets from the prompt": {
        "positions": "cache",
        "layer_budget": "squeeze-online",
    },
    "rocketkv, averages": {"pool_kind": "avg"},
    "rocketkv-mt, averages": {"pool_kind": "avg"},
    "snapkv++, averages and budgets from the prompt": {"pool_kind": "avg", "layer_budget": "squeeze-online"},
}
"""The forms that single tests compare."""
EVERY = tuple(one.name for one in policies.describe() if not policies.named(one.name).selection.oracle)
"""Every policy that an engine can have; the others are oracles of the reference."""
CASES = (*EVERY, *FORMS)
BY_ROW = tuple(
    f"{policy}, budgets from the prompt" for policy in ("sliding-window", "streaming-llm", "h2o", "tova")
)  # fmt: skip
"""Policies that evict at every step, in rows that use different numbers of slots."""


def case(name: str, model: ModelConfig = SMALL) -> tuple[str, dict[str, Any]]:
    """Return the policy of a name and its settings, for as many layers as the model has."""
    policy, _, form = name.partition(",")
    settings = {**LIMITS, **SETTINGS.get(policy, {}), **({**FORMS, **OTHER_FORMS}[name] if form else {})}
    if "head_scores" in settings:
        settings["head_scores"] = HEAD_SCORES[: model.num_hidden_layers]
    if settings.get("layer_budget") == "squeeze":
        budget, between = settings["token_budget"], model.num_hidden_layers - 2
        settings["layer_budgets"] = (budget * 5 // 4, *[budget] * between, budget * 3 // 4)
    return policy, settings


def parameters_of(name: str, model: ModelConfig = SMALL, **changes: Any) -> PolicyParameters:
    """Return the parameters of a case for a small model; `changes` replace its settings."""
    policy, settings = case(name, model)
    return policies.resolve(policy, model=model, **{**settings, **changes})


TAKING_TURNS = tuple(name for name in CASES if parameters_of(name).no_turn is None)
CHECKING_DRAFTS = tuple(name for name in CASES if parameters_of(name).no_drafts is None)
