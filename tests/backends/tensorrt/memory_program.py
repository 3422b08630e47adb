"""A program for a process of its own: the memory of the builder code while NVIDIA's other builder makes a plan.

    python -m tests.backends.tensorrt.memory_program KERNELS DIRECTORY GRAPH

Answers {"weights": bytes of the file, "held": most anonymous memory beyond that before the build}. Mapped pages of a
file do not count: the system drops them when memory is short.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path

import onnx

from kvc_trt.backends.tensorrt.building.builder import write_plan
from kvc_trt.backends.tensorrt.building.profiles import decode_profiles
from kvc_trt.files.held import HeldFile
from tests.backends.tensorrt import rtx
from tests.backends.tensorrt.damaged_plugins import register_plugins
from tests.backends.tensorrt.plan_program import StandIn


def anonymous_bytes() -> int:
    """Resident memory of this process that is backed by no file."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def main(kernels: str, directory: Path, graph: str) -> dict[str, int]:
    trt = StandIn(rtx.load())
    model = onnx.load(directory / f"{graph}.onnx", load_external_data=False)
    weights, plan = directory / "weights.safetensors", directory / "plan"
    most, done = [anonymous_bytes()], threading.Event()
    before = most[0]

    def watch() -> None:
        while not done.wait(0.005):
            most[0] = max(most[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with register_plugins(trt.get_plugin_registry(), trt, kernels, ()), plan.open("wb") as file:
            write_plan(trt, model, HeldFile(weights), decode_profiles(8)[:1], file)
    finally:
        done.set()
        watcher.join()
    return {"weights": weights.stat().st_size, "held": most[0] - before}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])))
