"""The directory of a TensorRT engine: plans beside the graphs, and the manifest's target."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvc_trt.engine.format import EXTEND_FILE, GRAPH_FILES
from kvc_trt.methods.base.parameters import PolicyParameters

INSPECTOR_DIRECTORY = "inspector"
_SHA256, _ARCHITECTURE = re.compile(r"[0-9a-f]{64}"), re.compile(r"sm_\d+[af]?")


def plan_file(graph: str) -> str:
    """Return the file of the plan (TensorRT's engine) of the `prefill`, `decode` or `extend` graph."""
    return f"{graph}.engine"


def inspector_file(graph: str) -> str:
    """Return the file of the inspector's description of that plan."""
    return f"{INSPECTOR_DIRECTORY}/{graph}.json"


GRAPHS = ("prefill", "decode", "extend")
"""The graphs that become plans; the last one only if the policy takes turns."""
WITH_PLANS = {**GRAPH_FILES, **{f"{graph}.engine": plan_file(graph) for graph in ("prefill", "decode")}}
"""Stage -> file, for a backend whose engines take no turns."""
WITH_DESCRIPTIONS = {
    **GRAPH_FILES,
    "extend": EXTEND_FILE,
    **{f"{graph}.engine": plan_file(graph) for graph in GRAPHS},
    **{f"{graph}.inspector": inspector_file(graph) for graph in GRAPHS},
}


def no_turns(parameters: PolicyParameters) -> str | None:
    """Return the reason why an engine takes no turns under this policy; None if it does.

    NVIDIA's builder (TensorRT-RTX 1.7.1) makes no plan of a graph in which every state tensor is first read and then
    overwritten: an assertion of its own fails. With page bounds, which are only overwritten, it does.
    """
    if parameters.no_turn is None and parameters.evicts_on_turns and not parameters.has_pages:
        return "NVIDIA's builder makes no plan of turns that compact a cache without pages"
    return parameters.no_turn


def target_problem(target: Any, backend: str, versions: frozenset[str]) -> str | None:
    """Return the problem of a manifest's `target`, which must have the versions of these packages; None if correct."""
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
