"""The classes that TensorRT sees. Their bases belong to a module of the TensorRT family, which is an argument here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from kvc_trt.backends.tensorrt.twins.calls import Kernels
from kvc_trt.backends.tensorrt.twins.fields import read_fields
from kvc_trt.backends.tensorrt.twins.plugin import PluginMethods
from kvc_trt.backends.tensorrt.twins.report import report
from kvc_trt.backends.tensorrt.twins.tables import NAMESPACE, VERSION, Operator


@cache
def plugin_class(trt: ModuleType) -> type[PluginMethods]:
    """The class of all plugins under this module."""
    bases = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime)

    def initialise(self: Any, *arguments: Any) -> None:
        for base in bases:
            base.__init__(self)
        PluginMethods.__init__(self, *arguments)
        _keep_for_ever(self)

    return type("Plugin", (PluginMethods, *bases), {"__init__": initialise})


def _keep_for_ever(plugin: object) -> None:
    """Add a reference that nobody gives back.

    When a build fails, NVIDIA's builder and Python both free a network's plugins: the process ends by a broken heap and
    not by the error (seen with TensorRT-RTX 1.7.1, two nodes of any plugin in Python). A plugin is small.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(plugin))


def make_creator(trt: ModuleType, operator: Operator, kernels: Callable[[], Kernels]) -> Any:
    """What a registry takes for one operator (trt.IPluginCreatorV3One)."""
    return _creator_class(trt)(operator, kernels)


@cache
def _creator_class(trt: ModuleType) -> Any:
    base = trt.IPluginCreatorV3One
    plugin = plugin_class(trt)

    class Creator(base):  # type: ignore[misc, valid-type]
        """Makes the plugins of one operator."""

        def __init__(self, operator: Operator, kernels: Callable[[], Kernels]) -> None:
            base.__init__(self)
            self._operator, self._kernels = operator, kernels
            self.name, self.plugin_version, self.plugin_namespace = operator.name, VERSION, NAMESPACE
            self._named = [
                trt.PluginField(field.name, np.array([], np.int32), trt.PluginFieldType.INT32)
                for field in operator.fields
            ]
            self.field_names = trt.PluginFieldCollection(self._named)

        def create_plugin(self, name: str, fields: Any, phase: Any) -> PluginMethods | None:
            """A plugin, or None and a line that says why not."""
            try:
                return plugin(trt, self._operator, read_fields(self._operator, fields), self._kernels)
            except Exception as error:
                report(self._operator.name, error)
                return None

    return Creator
