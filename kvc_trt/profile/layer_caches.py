"""The caches of every layer, where a policy gives layers, or KV heads of one layer, different room."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from kvc_trt.graph.state import CacheSite, cache_heads, cache_sites
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig


def layer_caches(model: ModelConfig, parameters: PolicyParameters) -> list[list[dict[str, Any]]]:
    """By layer, its caches as plain data: `heads` that one cache stores, each with so many `slots`."""

    def cache(site: CacheSite) -> dict[str, Any]:
        return {"heads": cache_heads(model, site), "slots": site.parameters.capacity}

    sites = cache_sites(model, parameters)
    return [[cache(site) for site in of_layer] for _, of_layer in groupby(sites, key=lambda site: site.layer)]
