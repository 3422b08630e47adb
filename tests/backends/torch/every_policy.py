"""Every policy that an engine can have, and every form of one that no kernel serves, with small constants."""

from __future__ import annotations

from kvc_trt import policies

SCORES = ((0.9, 0.1), (0.2, 0.8), (0.3, 0.1))
SETTINGS = {
    "snapkv": {"window": 8, "pool_kernel": 7},
    "pyramidkv": {"window": 8, "pool_kernel": 7},
    "rocketkv-mt": {"window": 16},
    "h2o": {"recent": 20},
}
FORMS = {
    "duo-attention, two caches in a layer": {"token_budget": 150, "sinks": 4, "recent": 20, "head_scores": SCORES},
    "streaming-llm, positions of the cache": {"positions": "cache"},
    "quest, a skipped layer": {"skip_layers": 1},
    "sparq, without the mean value": {"reallocate": False},
    "h2o, a budget for each layer": {"layer_budget": "squeeze", "layer_budgets": (120, 90, 78)},
}
EVERY = tuple(one.name for one in policies.describe() if not policies.named(one.name).selection.oracle)
CASES = (*EVERY, *FORMS)


def case(name: str) -> tuple[str, dict[str, object]]:
    """The policy of a case, and its settings."""
    policy = name.partition(",")[0]
    return policy, {"token_budget": 96, **SETTINGS.get(policy, {}), **FORMS.get(name, {})}
