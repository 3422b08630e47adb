"""The stages of every engine: one weight file, and the graphs that read it in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvc_trt.engine.format import WEIGHTS_FILE
from kvc_trt.engine.resolution.model_choice import ModelSource
from kvc_trt.engine.resolution.resolved_build import ResolvedBuild
from kvc_trt.graph.weights import GraphWeights, write_weights
from kvc_trt.progress import Progress

if TYPE_CHECKING:
    from onnx import ModelProto


class Maker(Protocol):
    """Writes the file of one stage."""

    def __call__(self, path: Path, *, finished: Path) -> None:
        """Write the file `path`; the files of earlier stages are in the directory `finished`."""


Makers = Mapping[str, Maker]
"""Stage -> the function that makes its file, for the stages of the backend's `files` that a build has."""


def graph_makers(resolved: ResolvedBuild, source: ModelSource, progress: Progress, stages: Collection[str]) -> Makers:
    """Return for each of the backend's `stages` the function that makes its file; making a graph imports onnx.

    The extend graph is included if the policy takes turns, the draft graph if the build asks for it."""
    turns = "extend" in stages and resolved.parameters.no_turn is None
    write = partial(_write_graph, resolved=resolved, progress=progress)
    makers: dict[str, Maker] = {
        "weights": partial(_write_weights, resolved=resolved, source=source, progress=progress),
        "prefill": partial(write, stage="prefill", turns=turns),
        "decode": partial(write, stage="decode"),
    }
    if turns:
        makers["extend"] = partial(write, stage="extend", all_logits=bool(resolved.config.all_logits))
    if "draft" in stages and resolved.config.draft_tokens is not None:
        makers["draft"] = partial(write, stage="draft", tokens=1 + resolved.config.draft_tokens)
    return makers


def _write_weights(
    path: Path, *, finished: Path, resolved: ResolvedBuild, source: ModelSource, progress: Progress
) -> None:
    length, kind = resolved.parameters.max_sequence_len, resolved.config.weights
    write_weights(resolved.model, source.weights, path, weights=kind, length=length, progress=progress)


def _write_graph(
    path: Path, *, finished: Path, stage: str, resolved: ResolvedBuild, progress: Progress, **options: Any
) -> None:
    """Write the graph of a stage; `options` are those of its builder alone."""
    from kvc_trt.graph import build  # which imports onnx

    builders: dict[str, Callable[..., ModelProto]] = {
        "prefill": build.build_prefill,
        "decode": build.build_decode,
        "extend": build.build_extend,
        "draft": build.build_draft,
    }
    with progress.task(f"building the {stage} graph", None):
        weights = GraphWeights(finished / WEIGHTS_FILE)
        model: Any = builders[stage](resolved.model, resolved.parameters, weights=weights, **options)
        path.write_bytes(model.SerializeToString(deterministic=True))
