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
    makers: dict[str, Maker] = {
        "weights": partial(_write_weights, resolved=resolved, source=source, progress=progress),
        "prefill": partial(_write_prefill, resolved=resolved, progress=progress, turns=turns),
        "decode": partial(_write_decode, resolved=resolved, progress=progress),
    }
    if turns:
        makers["extend"] = partial(_write_extend, resolved=resolved, progress=progress)
    if "draft" in stages and resolved.config.draft_tokens is not None:
        tokens = 1 + resolved.config.draft_tokens
        makers["draft"] = partial(_write_draft, resolved=resolved, progress=progress, tokens=tokens)
    return makers


def _write_weights(
    path: Path, *, finished: Path, resolved: ResolvedBuild, source: ModelSource, progress: Progress
) -> None:
    length, kind = resolved.parameters.max_sequence_len, resolved.config.weights
    write_weights(resolved.model, source.weights, path, weights=kind, length=length, progress=progress)


def _write_prefill(path: Path, *, finished: Path, resolved: ResolvedBuild, progress: Progress, turns: bool) -> None:
    from kvc_trt.graph.build import build_prefill

    with progress.task("building the prefill graph", None):
        _write_graph(partial(build_prefill, turns=turns), resolved, path, finished)


def _write_decode(path: Path, *, finished: Path, resolved: ResolvedBuild, progress: Progress) -> None:
    from kvc_trt.graph.build import build_decode

    with progress.task("building the decode graph", None):
        _write_graph(build_decode, resolved, path, finished)


def _write_extend(path: Path, *, finished: Path, resolved: ResolvedBuild, progress: Progress) -> None:
    from kvc_trt.graph.build import build_extend

    with progress.task("building the extend graph", None):
        _write_graph(partial(build_extend, all_logits=bool(resolved.config.all_logits)), resolved, path, finished)


def _write_draft(path: Path, *, finished: Path, resolved: ResolvedBuild, progress: Progress, tokens: int) -> None:
    from kvc_trt.graph.build import build_draft

    with progress.task("building the draft graph", None):
        _write_graph(partial(build_draft, tokens=tokens), resolved, path, finished)


def _write_graph(build: Callable[..., ModelProto], resolved: ResolvedBuild, path: Path, finished: Path) -> None:
    model: Any = build(resolved.model, resolved.parameters, weights=GraphWeights(finished / WEIGHTS_FILE))
    path.write_bytes(model.SerializeToString(deterministic=True))
