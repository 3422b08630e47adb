"""The methods that are compared in every cache format."""

from __future__ import annotations

from collections.abc import Sequence

from kvc_trt.models.cache_formats import AUTO, CACHE_FORMATS
from kvc_trt.policies import BASELINE

METHODS = (BASELINE, "rocketkv", "snapkv-gqa:pool_kernel=17", "tova", "hybrid")
_SETTING = ":kv_cache="


def in_every_format(methods: Sequence[str]) -> list[str]:
    """Return the names under which methods are compared: each as it is, then in the other formats."""
    return [in_format(method, form) for method in methods for form in CACHE_FORMATS]


def in_format(method: str, form: str) -> str:
    """Return the name under which a method is compared in one format."""
    return method if form == AUTO else f"{method}{_SETTING}{form}"


def split(name: str) -> tuple[str, str]:
    """Return the method and the format of a name."""
    method, _, form = name.partition(_SETTING)
    return method, form or AUTO
