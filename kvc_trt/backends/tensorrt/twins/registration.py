"""Twins in a plugin registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from kvc_trt.backends.tensorrt.twins.calls import Kernels
from kvc_trt.backends.tensorrt.twins.classes import make_creator
from kvc_trt.backends.tensorrt.twins.compact import COMPACT
from kvc_trt.backends.tensorrt.twins.dense_attention import DENSE_ATTENTION
from kvc_trt.backends.tensorrt.twins.hybrid_attention import HYBRID_ATTENTION
from kvc_trt.backends.tensorrt.twins.tables import NAMESPACE, Operator
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.kernels.c_library import KernelLibraryError
from kvc_trt.kernels.loading import VARIABLE, current_c_library

if TYPE_CHECKING:
    import tensorrt

OPERATORS = (COMPACT, HYBRID_ATTENTION, DENSE_ATTENTION)


class Registration:
    """Twins in a registry, which does not keep them alive itself; as a context manager it takes them out again."""

    def __init__(self, registry: tensorrt.IPluginRegistry, creators: list[Any]) -> None:
        self._registry, self._creators = registry, creators

    @property
    def names(self) -> frozenset[str]:
        """Operators that the registry serves through this."""
        return frozenset(creator.name for creator in self._creators)

    def close(self) -> None:
        """Take the creators out of the registry. Engines and networks made with them must be gone."""
        while self._creators:
            self._registry.deregister_creator(self._creators.pop())

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def register(
    registry: tensorrt.IPluginRegistry,
    trt: ModuleType,
    *,
    operators: Iterable[Operator] = OPERATORS,
    kernels: Kernels | None = None,
) -> Registration:
    """Put the twins into `registry`, a registry of the module `trt` (tensorrt, or another one of its family).

    `kernels` is the library that they call; without it the CUDA library of kvc_trt.kernels.loading, looked for when a
    profile is first checked. Raises UnsupportedEnvironment where the registry has such a plugin already. The result
    must live as long as the registry may use what is in it.
    """
    find: Callable[[], Kernels] = _cuda_kernels if kernels is None else lambda: kernels
    registration = Registration(registry, [])
    for operator in operators:
        creator = make_creator(trt, operator, find)
        if not registry.register_creator(creator, NAMESPACE):
            registration.close()
            raise UnsupportedEnvironment(
                f"plugin {operator.name}: TensorRT's registry has one already, expected none",
                hint="load the plugin library or register the twins, not both",
            )
        registration._creators.append(creator)
    return registration


def _cuda_kernels() -> Kernels:
    """TensorRT hands out addresses on the GPU, which the emulation would follow into nowhere."""
    found = current_c_library()
    if found is None:
        raise KernelLibraryError(f"no kernel library: expected {VARIABLE} or the package's own")
    if found.executor != "cuda":
        raise KernelLibraryError(f"{found.path} is the {found.executor} one, expected the one for cuda")
    return found
