"""The Python plugins in a registry, whole or with one thing wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvc_trt.backends.tensorrt.python_plugins import Registration, register
from kvc_trt.kernels.c_library import CLibrary
from kvc_trt.operators.registry import KERNEL_OPERATORS

V_CACHE_OUT = 2
"""Index of the cache of values among the outputs of both decode operators."""


def register_plugins(
    registry: Any, trt: Any, kernels: str | None, without: Iterable[str] = (), damage: str | None = None
) -> Registration:
    """Register all but those in `without`, over the kernel library at `kernels` (a plan asks it for workspaces).

    damage "alias": values are not updated in place any more.
    """
    assert damage in (None, "alias")
    operators = [operator for operator in KERNEL_OPERATORS if operator.name not in without]
    registration = register(registry, trt, operators=operators, kernels=_kernels(kernels))
    if damage == "alias":
        for kind in _subclasses(trt.IPluginV3OneBuildV2):
            _drop_alias(kind)
    return registration


def _kernels(path: str | None) -> Any:
    return None if path is None else CLibrary(path)


def _drop_alias(kind: Any) -> None:
    whole = kind.get_aliased_input

    def get_aliased_input(self: Any, output: int) -> int:
        return -1 if output == V_CACHE_OUT else int(whole(self, output))

    kind.get_aliased_input = get_aliased_input


def _subclasses(base: type) -> list[type]:
    direct = base.__subclasses__()
    return [*direct, *(kind for child in direct for kind in _subclasses(child))]
