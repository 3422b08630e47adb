"""Register the plugins: the classes that TensorRT sees, their creators, and reading of attributes.

The base classes belong to a module of the TensorRT family, which is an argument.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from functools import cache
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from kvc_trt.backends.tensorrt.python_plugins.calls import Kernels
from kvc_trt.backends.tensorrt.python_plugins.plugin import PluginMethods
from kvc_trt.backends.tensorrt.python_plugins.report import report
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.kernels.c_library import KernelLibraryError
from kvc_trt.kernels.loading import VARIABLE, current_c_library
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.dimensions import Refusal
from kvc_trt.operators.registry import KERNEL_OPERATORS
from kvc_trt.operators.schema import OF_SOME_CALLS, VERSION, Attribute, Operator

if TYPE_CHECKING:
    import tensorrt

_INT32 = 5  # PluginFieldType.INT32, for the message


class Registration:
    """Creators in a registry, which does not keep them alive. Use it as a context manager to deregister them."""

    def __init__(self, registry: tensorrt.IPluginRegistry, creators: list[Any]) -> None:
        self._registry, self._creators = registry, creators

    @property
    def names(self) -> frozenset[str]:
        """Operators registered by this object."""
        return frozenset(creator.name for creator in self._creators)

    def close(self) -> None:
        """Deregister the creators. Engines and networks made with them must be gone."""
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
    operators: Iterable[Operator] = KERNEL_OPERATORS,
    kernels: Kernels | None = None,
) -> Registration:
    """Put the plugins into `registry`, a registry of the module `trt` (tensorrt, or another one of its family).

    `kernels` is the library that they call, by default the CUDA library of kvc_trt.kernels.loading, found when a
    profile is first checked. Raises UnsupportedEnvironment if the registry already has such a plugin. The result must
    live as long as the registry uses the plugins.
    """
    find: Callable[[], Kernels] = _cuda_kernels if kernels is None else lambda: kernels
    registration = Registration(registry, [])
    for operator in operators:
        creator = make_creator(trt, operator, find)
        if not registry.register_creator(creator, KVC_DOMAIN):
            registration.close()
            raise UnsupportedEnvironment(
                f"plugin {operator.name}: TensorRT's registry has one already, expected none",
                hint="load the plugin library or register the Python plugins, not both",
            )
        registration._creators.append(creator)
    return registration


def _cuda_kernels() -> Kernels:
    """Return the CUDA library: TensorRT passes GPU addresses, which the emulation must never dereference."""
    found = current_c_library()
    if found is None:
        raise KernelLibraryError(f"no kernel library: expected {VARIABLE} or the package's own")
    if found.executor != "cuda":
        raise KernelLibraryError(f"{found.path} is the {found.executor} one, expected the one for cuda")
    return found


def make_creator(trt: ModuleType, operator: Operator, kernels: Callable[[], Kernels]) -> Any:
    """Return the creator of one operator's plugins (trt.IPluginCreatorV3One)."""
    return _creator_class(trt)(operator, kernels)


@cache
def _creator_class(trt: ModuleType) -> Any:
    base = trt.IPluginCreatorV3One
    plugin = plugin_class(trt)

    class Creator(base):  # type: ignore[misc, valid-type]
        """Creates the plugins of one operator."""

        def __init__(self, operator: Operator, kernels: Callable[[], Kernels]) -> None:
            base.__init__(self)
            self._operator, self._kernels = operator, kernels
            self.name, self.plugin_version, self.plugin_namespace = operator.name, VERSION, KVC_DOMAIN
            self._named = [
                trt.PluginField(attribute.name, np.array([], np.int32), trt.PluginFieldType.INT32)
                for attribute in operator.call_attributes
            ]
            self.field_names = trt.PluginFieldCollection(self._named)

        def create_plugin(self, name: str, fields: Any, phase: Any) -> PluginMethods | None:
            """Return a plugin; None, with the reason reported, if that is impossible."""
            try:
                values = read_fields(self._operator, fields)
                return plugin(trt, self._operator.for_numbers(values), values, self._kernels)
            except Exception as error:
                report(self._operator.name, error)
                return None

    return Creator


@cache
def plugin_class(trt: ModuleType) -> type[PluginMethods]:
    """Return the class of all plugins for this TensorRT module."""
    bases = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime)

    def initialise(self: Any, *arguments: Any) -> None:
        for base in bases:
            base.__init__(self)
        PluginMethods.__init__(self, *arguments)
        _keep_for_ever(self)

    return type("Plugin", (PluginMethods, *bases), {"__init__": initialise})


def _keep_for_ever(plugin: object) -> None:
    """Add a reference that is never released.

    When a build fails, NVIDIA's builder and Python both free a network's plugins, and the process ends with a broken
    heap instead of the error (seen with TensorRT-RTX 1.7.1, two nodes of any Python plugin). A plugin is small.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(plugin))


def read_fields(operator: Operator, collection: tensorrt.PluginFieldCollection | None) -> dict[str, int]:
    """Return the value of every attribute; Refusal with the field, what was expected and what was found.

    Engine files and networks are untrusted input. Every attribute is an INT in ONNX, which TensorRT passes as one
    INT32; each must be there exactly once, and nothing else. A node without one of OF_SOME_CALLS means 0.
    """
    known = {attribute.name: attribute for attribute in operator.call_attributes}
    if collection is None:
        raise Refusal("no fields")
    if len(collection) > len(known):
        raise Refusal(f"number of fields: expected {len(known)}, found {len(collection)}")
    values: dict[str, int] = {}
    for found in collection:
        if found.name not in known:
            raise Refusal(f"field {str(found.name)[:64]}: unknown")
        if found.name in values:
            raise Refusal(f"field {found.name}: given twice")
        values[found.name] = _value(known[found.name], found)
    for name, attribute in known.items():
        if attribute in OF_SOME_CALLS:
            values.setdefault(name, 0)
        if name not in values:
            raise Refusal(f"field {name}: missing")
    operator.check(values)
    return values


def _value(attribute: Attribute, found: tensorrt.PluginField) -> int:
    # Check type and length first: they determine how many bytes the bindings read from `data`.
    if found.type.name != "INT32" or found.size != 1:
        raise Refusal(
            f"field {attribute.name}: expected one INT32 (type {_INT32}, length 1), "
            f"found type {int(found.type)}, length {found.size}"
        )
    return int(found.data[0])
