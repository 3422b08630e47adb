"""Write files that deploy an engine on a cluster with Dynamo's operator: frontend, prefill and decode workers, image.

They follow the operator's schema (`nvidia.com/v1beta1`) and were not run on a cluster.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvc_trt.engine.manifest import MANIFEST_FILE, sealed
from kvc_trt.engine.writer import new_directory, place, writable_target
from kvc_trt.errors import InputError
from kvc_trt.files.atomic import write_durably
from kvc_trt.serving.dynamo.environment import DYNAMO_VERSION, NIXL_VERSION
from kvc_trt.serving.dynamo.model_directory import check_servable
from kvc_trt.version import __version__

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory

DEPLOYMENT_FILE, CONTAINER_FILE, ENGINE = "deployment.yaml", "Containerfile", "engine"
WORK = "/tmp/kvc-trt"
"""The directory in a container for the files of a worker."""

_HEADER = f"""\
# A deployment for the operator of NVIDIA Dynamo {DYNAMO_VERSION}, written by kvc-trt {__version__}. It follows the
# operator's schema and was not run on a cluster. Dynamo's frontend asks nobody for a key: put a gateway in front of it.
# Add to each container the resources that it needs (limits of memory and processors, or nvidia.com/gpu).
"""
_CONTAINERFILE = f"""\
# Beside this file: a wheel of kvc-trt {__version__} (pip wheel --no-deps kvc-trt), and the engine.
FROM docker.io/library/python:3.11-slim
COPY kvc_trt-{__version__}-py3-none-any.whl /tmp/
# Their own dependencies are Dynamo's planner's, and torch: nothing here needs them.
RUN pip install --no-cache-dir "/tmp/kvc_trt-{__version__}-py3-none-any.whl[dynamo]" \\
    && pip install --no-cache-dir --no-deps ai-dynamo=={DYNAMO_VERSION} nixl-cu12=={NIXL_VERSION} \\
    && useradd --create-home --uid 1000 dynamo
COPY {ENGINE} /engine
USER dynamo
"""


def export_deployment(
    engine: EngineDirectory, directory: Path, *, name: str, image: str, prefill: int, decode: int
) -> Path:
    """Write the deployment of an engine to a new directory and return its path: YAML, Containerfile and engine.

    `prefill` and `decode` are numbers of replicas. Raises InputError for an engine that cannot be served, and if the
    directory exists; UnsupportedEnvironment if the disk is full.
    """
    import yaml

    check_servable(engine)
    target = writable_target(directory)
    if target.exists() or target.is_symlink():
        raise InputError(f"{target} exists and is not replaced", hint="another -o, or remove it")
    document = yaml.safe_dump(graph_deployment(name, image, prefill=prefill, decode=decode), sort_keys=False)
    with new_directory(target) as made:
        (made / ENGINE).mkdir()
        write_durably(made / DEPLOYMENT_FILE, (_HEADER + document).encode())
        write_durably(made / CONTAINER_FILE, _CONTAINERFILE.encode())
        write_durably(made / ENGINE / MANIFEST_FILE, sealed(engine.manifest.to_json()))
        for inside, file in engine.held.items():
            place(file, made / ENGINE / inside)
    return target


def graph_deployment(name: str, image: str, *, prefill: int, decode: int) -> dict[str, Any]:
    """Return the DynamoGraphDeployment of a model: one frontend, and replicas of each role."""
    frontend = _component("frontend", 1, image, "dynamo.frontend", ["--router-mode", "round-robin"])
    workers = [
        _component(role, count, image, "kvc_trt.serving.dynamo.worker", _worker(name, role))
        for role, count in (("prefill", prefill), ("decode", decode))
    ]
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": name},
        "spec": {"components": [frontend, *workers]},
    }


def _worker(name: str, role: str) -> list[str]:
    places = ["--model", f"{WORK}/model", "--record", f"{WORK}/record"]
    return ["/engine", "--name", name, "--role", role, *places]


def _component(kind: str, replicas: int, image: str, module: str, arguments: list[str]) -> dict[str, Any]:
    """Return a component; the operator adds its discovery, ports and probes."""
    container = {"name": "main", "image": image, "command": ["python3", "-m", module], "args": arguments}
    pod = {"spec": {"containers": [container]}}
    return {"name": kind, "type": kind, "replicas": replicas, "podTemplate": pod}
