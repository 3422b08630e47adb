"""The twins in a registry, whole or with one thing wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvc_trt.backends.tensorrt.twins import register

V_CACHE_OUT = 2
"""Which output of both decode operators is the cache of values."""


def register_twins(registry: Any, trt: Any, without: Iterable[str] = (), damage: str | None = None) -> Any:
    """Register all twins but those in `without`; damage "alias": values are not updated in place any more.

    What is returned has to live as long as the registry is used.
    """
    kept = register(_Selective(registry, frozenset(without)), trt)
    if damage == "alias":
        for twin in _subclasses(trt.IPluginV3OneBuildV2):
            _drop_alias(twin)
    else:
        assert damage is None, damage
    return kept


class _Selective:
    """A registry that some creators do not reach."""

    def __init__(self, registry: Any, without: frozenset[str]) -> None:
        self._registry, self._without = registry, without

    def register_creator(self, creator: Any, namespace: str) -> bool:
        return creator.name in self._without or self._registry.register_creator(creator, namespace)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)


def _drop_alias(twin: type) -> None:
    whole = twin.get_aliased_input

    def get_aliased_input(self: Any, output: int) -> int:
        return -1 if output == V_CACHE_OUT else int(whole(self, output))

    twin.get_aliased_input = get_aliased_input


def _subclasses(base: type) -> list[type]:
    direct = base.__subclasses__()
    return [*direct, *(twin for child in direct for twin in _subclasses(child))]
