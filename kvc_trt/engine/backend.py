"""The build half of a backend: the builds that it accepts, the files that it makes, and the marks of its engines.

`kvc_trt.backends.base.Backend` adds the half that runs engines. Checking and inspecting an engine directory only needs
this half: an engine for a GPU can be inspected on any machine.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from kvc_trt.engine.format import CONFIG_FILE, EVERY_GRAPH, OPTIONAL_GRAPHS, graph_of
from kvc_trt.engine.graph_stages import Makers, graph_makers
from kvc_trt.engine.missing import missing_graph, missing_kernel
from kvc_trt.engine.resolution.model_choice import ModelChoice, ModelSource
from kvc_trt.engine.resolution.resolved_build import ResolvedBuild, WeightKind, checkpoint_weights
from kvc_trt.errors import InputError
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.cache_formats import AUTO
from kvc_trt.models.config import ModelConfig
from kvc_trt.progress import Progress

QUANTISED = "weights are quantised for ONNX Runtime, whose operator no other backend has"
FP8 = "TensorRT alone multiplies matrices in fp8; any other kind is made of them when an fp8 checkpoint is read"


class BuildBackend(ABC):
    """Builds engines. The defaults fit a backend that compiles nothing and runs the graphs' weights unchanged."""

    name: ClassVar[str]
    """The name for users and in config.json: that of the folder, with hyphens for underscores."""
    files: ClassVar[Mapping[str, str]] = EVERY_GRAPH
    """Stage of a build -> the file that it makes, in order; each stage may read the files of earlier ones."""
    architecture: ClassVar[str] = "any"
    """The manifest's architecture, for a backend that compiles nothing."""
    libraries: ClassVar[tuple[str, ...]] = ()
    """Python packages whose versions go into the manifest, besides those of every build."""
    weight_copies: ClassVar[int] = 1
    """The number of engine files that hold all weights."""
    weight_kinds: ClassVar[tuple[WeightKind, ...]] = ("bf16", "fp16", "fp32")
    """The weight formats that it runs, the recommended one first."""
    refused_weights: ClassVar[Mapping[str, str]] = {"int8": QUANTISED, "int4": QUANTISED, "keep": QUANTISED, "fp8": FP8}
    """Weight format -> why it does not run it."""
    cache_formats: ClassVar[tuple[str, ...]] = (AUTO,)
    """The formats in which its engines can store keys and values."""
    own_settings: ClassVar[tuple[str, ...]] = ("all_logits", "draft_tokens")
    """Build settings that it uses and some other backend does not."""
    every_operator: ClassVar[bool] = False
    """True if it runs every graph; other backends need a kernel for each operator."""
    measures_break_even: ClassVar[bool] = False
    """True if it supports `--dense-until auto`."""

    @property
    def required_files(self) -> tuple[str, ...]:
        """The files that one of its engines must have."""
        return CONFIG_FILE, *(file for stage, file in self.files.items() if graph_of(stage) not in OPTIONAL_GRAPHS)

    @property
    def files_of_turns(self) -> tuple[str, ...]:
        """The files that one of its engines has if it takes turns: all of them or none."""
        return tuple(file for stage, file in self.files.items() if graph_of(stage) == "extend")

    def missing(self, parameters: PolicyParameters, layers: int) -> str | None:
        """Return the graph or kernel that the policy needs in any of `layers` layers and that is missing; or None."""
        missing = missing_graph(parameters, layers)
        return missing if missing is not None or self.every_operator else missing_kernel(parameters, layers)

    def missing_part(self, model: ModelConfig) -> str | None:
        """Return the parts of a model that its engines cannot compute, as in "no kernel for ..."; None without such.

        Heavy libraries are not imported: a plan asks too.
        """
        return None

    def why_no_weights(self, kind: str) -> str:
        """Return the reason why it does not run weights of this format."""
        return self.refused_weights.get(kind, f"{self.name} does not run them")

    def default_weights(self, choice: ModelChoice) -> WeightKind:
        """Return the weight format of a build for which the user gives none."""
        return checkpoint_weights(choice)

    def break_even(self, model: ModelConfig, parameters: PolicyParameters, dtype: str) -> int:
        """Measure `--dense-until auto`: the length up to which a dense step is at least as fast as a sparse one."""
        raise InputError(
            "--dense-until auto is measured on a CPU, which says nothing about a GPU; expected a number of tokens",
            hint="--dense-until TOKENS, or leave it out: the default is the token budget",
        )

    def no_turns(self, parameters: PolicyParameters) -> str | None:
        """Return the reason why its engines take no turns of a conversation under this policy; None if they do."""
        return parameters.no_turn if "extend" in self.files else f"backend {self.name} has none"

    def makers(self, resolved: ResolvedBuild, source: ModelSource, progress: Progress) -> Makers:
        """Return for each stage the function that makes its file; heavy libraries are imported on the first call."""
        left_out = set() if self.no_turns(resolved.parameters) is None else {"extend"}
        return graph_makers(resolved, source, progress, self.files.keys() - left_out)

    def sources(self) -> Iterable[Path]:
        """Return the source files that determine its engines; if one changes, engines are out of date."""
        return ()

    def target(self, resolved: ResolvedBuild) -> Mapping[str, Any]:
        """Return the manifest's `target`; UnsupportedEnvironment if this machine cannot build for it."""
        return self._portable_target

    def target_problem(self, target: Any) -> str | None:
        """Return the problem of a manifest's `target`; None if it is right."""
        return None if target == self._portable_target else f"expected {self._portable_target}"

    @property
    def _portable_target(self) -> dict[str, Any]:
        return {"backend": self.name, "architecture": self.architecture}
