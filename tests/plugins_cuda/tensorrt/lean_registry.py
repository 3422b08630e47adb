"""A program for a process of its own: one plugin library in the registry of TensorRT's lean runtime, answers as JSON.

It runs in a process of its own, because a runtime and a library that do not fit end the process by a signal.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import numpy as np
import tensorrt_lean_bindings as trt

TYPES = {"int32": trt.PluginFieldType.INT32, "int64": trt.PluginFieldType.INT64, "float32": trt.PluginFieldType.FLOAT32}
PHASES = {"build": trt.TensorRTPhase.BUILD, "runtime": trt.TensorRTPhase.RUNTIME}


def main(path: str, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Load, list, create the plugins of `requests` ({operator, phase, fields: [[name, dtype, values]]}), unload."""
    registry = trt.get_plugin_registry()
    handle = registry.load_library(path)
    if handle is None:
        return {"loaded": False}
    library = ctypes.CDLL(path)
    library.kvc_plugin_last_error.restype = ctypes.c_char_p
    ours = [creator for creator in registry.all_creators if creator.plugin_namespace == "kvc"]
    creators = {c.name: [c.plugin_version, [[f.name, f.type.name] for f in c.field_names]] for c in ours}
    created = [_create(registry, library, **request) for request in requests]
    again = registry.load_library(path)
    del ours
    registry.deregister_library(handle)
    left = [name for name in creators if registry.get_creator(name, "1", "kvc") is not None]
    return {
        "version": trt.__version__, "loaded": True, "creators": creators, "created": created,
        "loaded_twice": again is not None, "left": left,
    }  # fmt: skip


def _create(registry: Any, library: ctypes.CDLL, operator: str, phase: str, fields: list[Any]) -> dict[str, Any]:
    values = [np.array(value, dtype) for _, dtype, value in fields]
    collection = trt.PluginFieldCollection(
        [trt.PluginField(name, value, TYPES[dtype]) for (name, dtype, _), value in zip(fields, values, strict=True)]
    )
    plugin = registry.get_creator(operator, "1", "kvc").create_plugin("layer", collection, PHASES[phase])
    if plugin is None:
        return {"created": False, "reason": library.kvc_plugin_last_error().decode()}
    kinds = (trt.PluginCapabilityType.CORE, trt.PluginCapabilityType.BUILD, trt.PluginCapabilityType.RUNTIME)
    interfaces = [plugin.get_capability_interface(kind).interface_info for kind in kinds]
    return {"created": True, "interfaces": [[info.kind, info.major, info.minor] for info in interfaces]}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
