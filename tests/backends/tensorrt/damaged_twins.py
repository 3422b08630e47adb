"""The twins in a registry, whole or with one thing wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvc_trt.backends.tensorrt.twins import OPERATORS, Registration, register
from kvc_trt.kernels.c_library import CLibrary

V_CACHE_OUT = 2
"""Which output of both decode operators is the cache of values."""


def register_twins(
    registry: Any, trt: Any, kernels: str | None, without: Iterable[str] = (), damage: str | None = None
) -> Registration:
    """Register all twins but those in `without`, over the kernel library at `kernels` (a plan asks it for workspaces).

    damage "alias": values are not updated in place any more.
    """
    assert damage in (None, "alias")
    operators = [operator for operator in OPERATORS if operator.name not in without]
    registration = register(registry, trt, operators=operators, kernels=_kernels(kernels))
    if damage == "alias":
        for twin in _subclasses(trt.IPluginV3OneBuildV2):
            _drop_alias(twin)
    return registration


def _kernels(path: str | None) -> Any:
    return None if path is None else CLibrary(path)


def _drop_alias(twin: Any) -> None:
    whole = twin.get_aliased_input

    def get_aliased_input(self: Any, output: int) -> int:
        return -1 if output == V_CACHE_OUT else int(whole(self, output))

    twin.get_aliased_input = get_aliased_input


def _subclasses(base: type) -> list[type]:
    direct = base.__subclasses__()
    return [*direct, *(twin for child in direct for twin in _subclasses(child))]
