"""What TensorRT says about a finished plan: its layers as JSON, and whether the state is updated in place.

Takes a GPU: a plan can only be asked once it is loaded. Host code in plans is never allowed to run.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

from onnx import ModelProto

from kvc_trt.backends.tensorrt.lowering import check_aliases, engine_aliases, expected_aliases
from kvc_trt.backends.tensorrt.messages import Messages
from kvc_trt.backends.tensorrt.module import TensorRT
from kvc_trt.errors import UnsupportedEnvironment


def inspect_plan(trt: TensorRT, plan: Path, graph: ModelProto) -> dict[str, Any]:
    """The engine inspector's description of a plan that was built from `graph`; the plugins must be in the registry.

    Never call it without a driver: TensorRT's runtime then comes back whole, and ends the process when it is used.
    Raises UnsupportedEnvironment where the plan does not load, or copies its state instead of updating it in place.
    """
    messages = Messages()
    logger = messages.logger(trt)
    runtime = trt.Runtime(logger)
    with plan.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        raise UnsupportedEnvironment(
            f"TensorRT {trt.__version__} does not load its own {graph.graph.name} engine: {messages.reason()}",
            hint="kvc-trt doctor shows the GPU and the plugin library in use",
        )
    check_aliases(engine_aliases(engine), expected_aliases(graph))
    inspector = engine.create_engine_inspector()
    found = json.loads(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
    if not isinstance(found, dict):
        raise UnsupportedEnvironment(f"TensorRT {trt.__version__} describes an engine as {type(found).__name__}")
    return found
