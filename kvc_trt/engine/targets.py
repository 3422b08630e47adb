"""What an engine of each backend consists of: its files, the stage that makes each, and how the manifest names it.

All of it can be told from the directory alone: an engine for a GPU is checked and inspected on any machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

CONFIG_FILE, PREFILL_FILE, DECODE_FILE = "config.json", "prefill.onnx", "decode.onnx"
WEIGHTS_FILE, TOKENIZER_DIRECTORY, INSPECTOR_DIRECTORY = "weights.safetensors", "tokenizer", "inspector"

_GRAPHS = {"weights": WEIGHTS_FILE, "prefill": PREFILL_FILE, "decode": DECODE_FILE}
_SHA256, _ARCHITECTURE = re.compile(r"[0-9a-f]{64}"), re.compile(r"sm_\d+[af]?")


def plan_file(graph: str) -> str:
    """File of the plan (TensorRT's engine) of the `prefill` or the `decode` graph."""
    return f"{graph}.engine"


def inspector_file(graph: str) -> str:
    """File of what TensorRT's inspector said about that plan."""
    return f"{INSPECTOR_DIRECTORY}/{graph}.json"


_PLANS = {f"{graph}.engine": plan_file(graph) for graph in ("prefill", "decode")}
_DESCRIPTIONS = {f"{graph}.inspector": inspector_file(graph) for graph in ("prefill", "decode")}

STAGES: dict[str, dict[str, str]] = {
    "onnxruntime": _GRAPHS,
    "torch": _GRAPHS,
    "tensorrt": {**_GRAPHS, **_PLANS, **_DESCRIPTIONS},
    "tensorrt-llm": {**_GRAPHS, **_PLANS},
}
"""Backend -> {stage: the one file that it makes}, in order: each may read the files of those before it."""

PORTABLE_ARCHITECTURE = {"onnxruntime": "cpu", "torch": "any"}
"""What backends that compile nothing name as architecture: ONNX graphs and weights are the same everywhere."""

ENTRIES = frozenset(
    (CONFIG_FILE, TOKENIZER_DIRECTORY, *(file.split("/")[0] for stages in STAGES.values() for file in stages.values()))
)
"""Every name that an engine directory of any backend may hold, besides its manifest."""


def required_files(backend: str) -> tuple[str, ...]:
    """Files without which an engine of this backend is not whole."""
    return CONFIG_FILE, *STAGES[backend].values()


def portable_target(backend: str) -> dict[str, Any]:
    """`target` in the manifest of a backend that compiles nothing."""
    return {"backend": backend, "architecture": PORTABLE_ARCHITECTURE[backend]}


def target_problem(target: Any, backend: str) -> str | None:
    """What is wrong with a manifest's `target` where the configuration names `backend`; None if nothing is."""
    if backend not in STAGES:
        return f"expected a target of backend {', '.join(STAGES)}"
    if backend in PORTABLE_ARCHITECTURE:
        expected = portable_target(backend)
        return None if target == expected else f"expected {expected}"
    versions = {"tensorrt"} if backend == "tensorrt" else {"tensorrt", "tensorrt_llm"}
    return _compiled_problem(target, backend, versions)


def _compiled_problem(target: Any, backend: str, versions: set[str]) -> str | None:
    names = {"backend", "architecture", "plugins", "compatibility", *versions}
    if not isinstance(target, Mapping) or set(target) != names or target["backend"] != backend:
        return f"expected backend {backend} with {', '.join(sorted(names))}"
    plugins = target["plugins"]
    if not isinstance(plugins, Mapping) or set(plugins) != {"file", "sha256", "abi"}:
        return "expected target.plugins with file, sha256, abi"
    right = {
        "architecture": isinstance(target["architecture"], str) and _ARCHITECTURE.fullmatch(target["architecture"]),
        **{name: isinstance(target[name], str) for name in versions},
        "compatibility": target["compatibility"] in ("none", "hardware"),
        "plugins.file": isinstance(plugins["file"], str) and "/" not in plugins["file"],
        "plugins.sha256": isinstance(plugins["sha256"], str) and _SHA256.fullmatch(plugins["sha256"]),
        "plugins.abi": type(plugins["abi"]) is int,
    }
    wrong = [name for name, good in right.items() if not good]
    return f"target.{wrong[0]} is malformed" if wrong else None
