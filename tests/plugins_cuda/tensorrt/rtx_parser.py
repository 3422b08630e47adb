"""A program for a process of its own: NVIDIA's ONNX parser and builder on one graph, answers as JSON.

The wheels of TensorRT-RTX are the only ones that bring both, and they work on a CPU up to the finished plan. They are a
test's oracle for the graph and the plugins, never a target.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import tensorrt_rtx_bindings as trt

BATCH, PROMPT = (1, 2, 4), (64, 256, 512)
"""Minimum, optimum, maximum of the profile."""


class Log(trt.ILogger):
    """Keeps errors."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.errors: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        """Called by TensorRT."""
        if severity <= trt.ILogger.Severity.ERROR:
            self.errors.append(message)


def preload(work: Path) -> None:
    """The parser opens libtensorrt_rtx.so, a name that the wheel does not have; without it the process dies."""
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    library = Path(next(iter(spec.submodule_search_locations))) / "libtensorrt_rtx.so.1"
    (work / "empty.c").write_text("")
    link = ["-Wl,-soname,libtensorrt_rtx.so", "-Wl,--no-as-needed", f"-Wl,-rpath,{library.parent}"]
    output = work / "libtensorrt_rtx_alias.so"
    subprocess.run(["gcc", "-shared", *link, "-o", output, work / "empty.c", library], check=True)
    ctypes.CDLL(str(output))


def main(work: Path, plugins: str, graph: str, aliases: bool) -> dict[str, Any]:
    """Parse `graph` with the plugin library (none if ""), then build a plan; `aliases` enables aliased plugin I/O."""
    preload(work)
    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(0)
    if plugins and builder.get_plugin_registry().load_library(plugins) is None:
        return {"loaded": False}
    parser = trt.OnnxParser(network, log)
    answer: dict[str, Any] = {"loaded": True, "parsed": parser.parse_from_file(graph)}
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    found = [layer for layer in layers if layer.type == trt.LayerType.PLUGIN_V3]
    answer["plugins"] = [
        [layer.name, [_describe(layer.get_output(i)) for i in range(layer.num_outputs)]] for layer in found
    ]
    answer["outputs"] = {
        network.get_output(i).name: _describe(network.get_output(i)) for i in range(network.num_outputs)
    }
    if answer["parsed"]:
        config = builder.create_builder_config()
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, aliases)
        config.add_optimization_profile(_profile(builder, network))
        plan = builder.build_serialized_network(network, config)
        answer["plan_bytes"] = 0 if plan is None else plan.nbytes
    answer["errors"] = log.errors
    return answer


def _describe(tensor: Any) -> list[Any]:
    return [list(tensor.shape), tensor.dtype.name]


def _profile(builder: Any, network: Any) -> Any:
    profile = builder.create_optimization_profile()
    for tensor in (network.get_input(i) for i in range(network.num_inputs)):
        if -1 in tuple(tensor.shape):
            sizes = [
                tuple(size if size != -1 else _dynamic(tensor, axis, end) for axis, size in enumerate(tensor.shape))
                for end in range(3)
            ]
            profile.set_shape(tensor.name, *sizes)
    return profile


def _dynamic(tensor: Any, axis: int, end: int) -> int:
    """The batch comes first, except in `cache_lengths` of the decode graph, [caches,batch]."""
    return BATCH[end] if axis == 0 or len(tensor.shape) == 2 else PROMPT[end]


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "aliases")))
