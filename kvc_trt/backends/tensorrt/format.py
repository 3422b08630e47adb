"""The directory of a TensorRT engine: plans beside the graphs, and the manifest's target."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvc_trt.engine.format import GRAPH_FILES

INSPECTOR_DIRECTORY = "inspector"
_SHA256, _ARCHITECTURE = re.compile(r"[0-9a-f]{64}"), re.compile(r"sm_\d+[af]?")


def plan_file(graph: str) -> str:
    """Return the file of the plan (TensorRT's engine) of the `prefill` or `decode` graph."""
    return f"{graph}.engine"


def inspector_file(graph: str) -> str:
    """Return the file of the inspector's description of that plan."""
    return f"{INSPECTOR_DIRECTORY}/{graph}.json"


WITH_PLANS = {**GRAPH_FILES, **{f"{graph}.engine": plan_file(graph) for graph in ("prefill", "decode")}}
WITH_DESCRIPTIONS = {**WITH_PLANS, **{f"{graph}.inspector": inspector_file(graph) for graph in ("prefill", "decode")}}


def target_problem(target: Any, backend: str, versions: frozenset[str]) -> str | None:
    """Return what is wrong with a manifest's `target`, which must name the `versions` of these packages, or None."""
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
