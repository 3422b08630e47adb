"""A program for a process of its own: the builder code on NVIDIA's other builder, which works on a CPU.

    python -m tests.backends.tensorrt.plan_program REQUESTS.json      # {NAME: REQUEST, ...}, answers likewise
    {"graph": PATH, "weights": PATH | null, "kernels": PATH, "profiles": [[[1,1,8], [128,256,256] | null], ...],
     "without": [...], "stop": "interrupt" | "disk", "cache": PATH, "settings": true, "layers": true, "contains": [HEX]}

Prints the outcome. The program builds a plan of TensorRT-RTX, which tests inspect and never run as an engine.
"""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx

from kvc_trt.backends.tensorrt.building.builder import PlanOptions, configuration, write_plan
from kvc_trt.backends.tensorrt.building.network import parsed_network
from kvc_trt.backends.tensorrt.building.profiles import Profile, SizeRange
from kvc_trt.backends.tensorrt.lowering import PLUGINS
from kvc_trt.errors import KvcError
from kvc_trt.files.held import HeldFile
from tests.backends.tensorrt import rtx
from tests.backends.tensorrt.damaged_plugins import register_plugins


class Recorded:
    """A progress that remembers; with `interrupt` its first step is interrupted."""

    def __init__(self, *, interrupt: bool) -> None:
        self.tasks: dict[str, list[int | None]] = {}
        self.open = 0
        self._interrupt = interrupt

    @contextmanager
    def task(self, description: str, total: int | None) -> Any:
        self.tasks[description] = [total, 0]
        self.open += 1

        def advance(amount: int) -> None:
            if self._interrupt:
                raise KeyboardInterrupt
            self.tasks[description][1] += amount

        yield advance
        self.open -= 1

    def note(self, message: str) -> None:
        self.tasks[message] = []


class FullDisk(io.BytesIO):
    def write(self, data: Any) -> int:
        raise OSError(28, "No space left on device")


def main(request: dict[str, Any]) -> dict[str, Any]:
    trt = StandIn(rtx.load())
    profiles = [
        Profile(SizeRange(*batch), SizeRange(*length) if length else None) for batch, length in request["profiles"]
    ]
    cache = request.get("cache")
    options = PlanOptions(timing_cache=Path(cache) if cache else None)
    graph, weights = onnx.load(request["graph"], load_external_data=False), request["weights"]
    weights = HeldFile(weights) if weights else None
    progress = Recorded(interrupt=request.get("stop") == "interrupt")
    file = FullDisk() if request.get("stop") == "disk" else io.BytesIO()
    registry = trt.get_plugin_registry()
    answer: dict[str, Any] = {}
    with register_plugins(registry, trt, request["kernels"], request.get("without", ())):
        try:
            if request.get("settings"):
                return settings(trt, graph, weights, profiles, options)
            if request.get("layers"):
                answer["layers"] = layers(trt, graph, weights)
            report = write_plan(trt, graph, weights, profiles, file, options=options, progress=progress)
            answer |= {"plugins": report.plugins, "notes": [list(note) for note in report.notes]}
        except (KvcError, KeyboardInterrupt, OSError) as error:
            answer |= {"error": type(error).__name__, "message": str(error)}
    plan = file.getvalue()
    contained = [bytes.fromhex(piece) in plan for piece in request.get("contains", ())]
    return answer | {"bytes": len(plan), "contained": contained, "tasks": progress.tasks, "open": progress.open}


def settings(trt: Any, graph: Any, weights: HeldFile | None, profiles: Any, options: PlanOptions) -> dict[str, Any]:
    """Return the configuration itself, read back from the builder."""
    with parsed_network(trt, graph, weights, PLUGINS) as network:
        config = configuration(trt, network, profiles, options)
        return {
            "aliases": config.get_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03),
            "tf32": config.get_flag(trt.BuilderFlag.TF32),
            "verbosity": config.profiling_verbosity.name,
            "profiles": config.num_optimization_profiles,
            "strongly_typed": network.definition.get_flag(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED),
        }


def layers(trt: Any, graph: Any, weights: HeldFile | None) -> dict[str, int]:
    """Layers of the network by kind and type: `DEQUANTIZE BF16`."""
    with parsed_network(trt, graph, weights, PLUGINS) as network:
        found = (network.definition.get_layer(index) for index in range(network.definition.num_layers))
        return dict(Counter(f"{layer.type.name} {layer.get_output(0).dtype.name}" for layer in found))


class StandIn:
    """The RTX module with the version of the TensorRT that has the same parser: it calls itself 1.7."""

    __version__ = "11.4 (TensorRT-RTX standing in)"

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


if __name__ == "__main__":
    requests = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps({name: main(request) for name, request in requests.items()}))
