"""A program for a process of its own: the Python plugins in the registry of one TensorRT module, answers as JSON.

    python -m tests.backends.tensorrt.python_plugins_program tensorrt_lean_bindings REQUEST.json

It runs in a process of its own, because two modules of the family do not fit into one.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvc_trt.backends.tensorrt.python_plugins import last_refusal, register
from kvc_trt.errors import KvcError
from tests.backends.tensorrt import rtx

NUMBERS = {"INT32": np.int32, "INT64": np.int64, "FLOAT32": np.float32, "INT8": np.int8, "CHAR": np.int8}


_kept: list[Any] = []
"""The bindings keep a field's memory alive through the field, which a collection only copies."""


def collection(trt: Any, fields: Mapping[str, int]) -> Any:
    """Well-formed fields as TensorRT hands them over."""
    return raw_collection(trt, [[name, "INT32", [value]] for name, value in fields.items()])


def raw_collection(trt: Any, fields: list[Any]) -> Any:
    """Fields as they are: [[name, type, values]]."""
    made = [
        trt.PluginField(name, np.array(values, NUMBERS[kind]), getattr(trt.PluginFieldType, kind))
        for name, kind, values in fields
    ]
    _kept.extend(made)
    return trt.PluginFieldCollection(made)


def main(module: str, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Register, list, create the plugins of `requests` ({operator, fields}), register again, close."""
    trt = rtx.load() if module == rtx.BINDINGS else importlib.import_module(module)
    registry = trt.get_plugin_registry()
    answer: dict[str, Any] = {"version": trt.__version__}
    registration = register(registry, trt)
    ours = [creator for creator in registry.all_creators if creator.plugin_namespace == "kvc"]
    answer["creators"] = {c.name: [c.plugin_version, [[f.name, f.type.name] for f in c.field_names]] for c in ours}
    answer["created"] = [_create(trt, registry, **request) for request in requests]
    answer["again"] = _refused(lambda: register(registry, trt))
    answer["kept"] = [name for name in answer["creators"] if registry.get_creator(name, "1", "kvc") is not None]
    del ours
    registration.close()
    answer["left"] = [name for name in answer["creators"] if registry.get_creator(name, "1", "kvc") is not None]
    return answer


def _create(trt: Any, registry: Any, operator: str, fields: list[Any]) -> dict[str, Any]:
    creator, made = registry.get_creator(operator, "1", "kvc"), raw_collection(trt, fields)
    answers = []
    for phase in (trt.TensorRTPhase.BUILD, trt.TensorRTPhase.RUNTIME):
        plugin = creator.create_plugin("layer", made, phase)
        if plugin is None:
            answers.append({"created": False, "reason": last_refusal()})
        else:
            kept = {field.name: field.data.tolist() for field in plugin.get_fields_to_serialize()}
            kinds = (trt.PluginCapabilityType.CORE, trt.PluginCapabilityType.BUILD, trt.PluginCapabilityType.RUNTIME)
            bases = (trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime)
            able = [isinstance(plugin.get_capability_interface(k), b) for k, b in zip(kinds, bases, strict=True)]
            answers.append({"created": True, "fields": kept, "capable": all(able)})
    assert answers[0] == answers[1]
    return answers[0]


def _refused(action: Any) -> str | None:
    try:
        action()
    except KvcError as error:
        return error.message
    return None


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))))
