"""A program for a process of its own: lowered graphs through NVIDIA's parser and builder, answers as JSON.

    python rtx_program.py REQUEST.json        # {"plugins": ..., "graphs": [{"path": ..., "plan": false, ...}]}

It runs in a process of its own, because the parser ends the process after a bad error, and because the registry of
plugins belongs to the process.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import onnx

from kvc_trt.backends.tensorrt.lowering import check_network, network_aliases, plugin_layers
from kvc_trt.errors import KvcError
from tests.backends.tensorrt import rtx
from tests.backends.tensorrt.damaged_plugins import register_plugins

BATCH, PROMPT = (1, 2, 4), (128, 256, 512)
"""Minimum, optimum, maximum of the profile."""


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Register what the request names, then parse its graphs one after the other.

    plugins: "python", "none", or the path of a library; kernels: what the Python plugins call when a plan is built;
    without and damage: see damaged_plugins.py.
    """
    trt = rtx.load()
    log = _log(trt)
    builder = trt.Builder(log)
    with _registered(trt, builder.get_plugin_registry(), request):
        return {"graphs": [_parse(trt, builder, log, graph) for graph in request["graphs"]]}


def _log(trt: Any) -> Any:
    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                self.errors.append(message)

    return Log()


def _registered(trt: Any, registry: Any, request: dict[str, Any]) -> AbstractContextManager[Any]:
    if request["plugins"] == "none":
        return nullcontext()
    if request["plugins"] != "python":
        assert registry.load_library(request["plugins"]) is not None, f"{request['plugins']} was not loaded"
        return nullcontext()
    return register_plugins(registry, trt, request["kernels"], request["without"], request["damage"])


def _parse(trt: Any, builder: Any, log: Any, request: dict[str, Any]) -> dict[str, Any]:
    log.errors.clear()
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    parsed = parser.parse_from_file(request["path"])
    answer: dict[str, Any] = {
        "parsed": parsed,
        "errors": [parser.get_error(index).desc() for index in range(parser.num_errors)],
        "plugins": plugin_layers(network),
        "kinds": Counter(network.get_layer(index).type.name for index in range(network.num_layers)),
        "outputs": {
            network.get_output(index).name: rtx.describe(network.get_output(index))
            for index in range(network.num_outputs)
        },
    }
    if parsed:
        answer |= _checked(trt, network, request["path"])
    if parsed and request.get("plan"):
        answer["plan_bytes"] = _plan_bytes(trt, builder, network, aliases=request.get("aliases", True))
    answer["log"] = list(log.errors)
    return answer


def _checked(trt: Any, network: Any, path: str) -> dict[str, Any]:
    try:
        check_network(network, onnx.load(path, load_external_data=False))
        problem = None
    except KvcError as error:
        problem = error.message
    return {"problem": problem, "aliases": network_aliases(network), "attention": _attention(trt, network)}


def _attention(trt: Any, network: Any) -> list[list[Any]]:
    """[causal mask, may be taken apart, has a mask of its own] of each fused attention."""
    found = []
    for layer in (network.get_layer(index) for index in range(network.num_layers)):
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            attention = layer.attention
            found.append([attention.causal_kind.name, attention.decomposable, attention.mask is not None])
    return found


def _plan_bytes(trt: Any, builder: Any, network: Any, *, aliases: bool) -> int:
    config = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, aliases)
    profile = builder.create_optimization_profile()
    for tensor in (network.get_input(index) for index in range(network.num_inputs)):
        if -1 in tuple(tensor.shape):
            profile.set_shape(tensor.name, *(_sizes(tensor, end) for end in range(3)))
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    return 0 if plan is None else int(plan.nbytes)


def _sizes(tensor: Any, end: int) -> tuple[int, ...]:
    """The batch comes first, except in `cache_lengths` of the decode graph, [caches,batch]."""
    batch_axis = 1 if tensor.name == "cache_lengths" else 0
    return tuple(
        size if size != -1 else (BATCH if axis == batch_axis else PROMPT)[end]
        for axis, size in enumerate(tuple(tensor.shape))
    )


if __name__ == "__main__":
    print(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
