"""The base class of backends: one object answers everything that the rest of kvc-trt asks.

A backend is one folder, `kvc_trt/backends/<name>/`, whose `backend.py` assigns an object of a subclass to `BACKEND`;
`registry` finds it there. Importing that file imports no heavy library: methods import what they use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from kvc_trt.backends.benchmark import Benchmark
from kvc_trt.backends.harness import Harness
from kvc_trt.backends.probes import Probe
from kvc_trt.backends.run_options import PrefillPrecision, RunOptions
from kvc_trt.engine import EngineDirectory
from kvc_trt.engine.build import Makers
from kvc_trt.engine.format import EVERY_GRAPH
from kvc_trt.engine.graph_stages import graph_makers
from kvc_trt.engine.model_choice import ModelChoice, ModelSource
from kvc_trt.engine.program import Program
from kvc_trt.engine.resolved_build import ResolvedBuild, WeightKind, checkpoint_weights
from kvc_trt.engine.supported import missing_graph, missing_kernel
from kvc_trt.errors import InputError
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.progress import Progress
from kvc_trt.runtime.executor import Executor

QUANTISED = "weights are quantised for ONNX Runtime, whose operator no other backend has"
FP8 = "TensorRT alone multiplies matrices in fp8; any other kind is made of them when an fp8 checkpoint is read"


class ProgramRunner(Protocol):
    """Opens engines over one weight file that exist in memory only."""

    def open(self, program: Program) -> Executor:
        """Return an executor of the program, without loading anything."""

    def forget(self) -> None:
        """Drop what was kept of earlier prompts: the next ones are others."""


class Backend(ABC):
    """A backend. The defaults fit a backend that compiles nothing and runs the graphs' weights as they are."""

    name: ClassVar[str]
    """The name for users and in config.json: that of the folder, with hyphens for underscores."""
    purpose: ClassVar[str]
    """Its purpose in a few words, for doctor's table."""
    automatic: ClassVar[int | None] = None
    """Its place in the order in which `--backend auto` tries backends, smallest first; None if auto never takes it."""
    executes: ClassVar[bool] = True
    """Whether it runs engines; a backend that does not only builds them for another program."""
    instead: ClassVar[str | None] = None
    """What runs its engines, if it does not."""
    profile_instead: ClassVar[str | None] = None
    """What measures its engines, if it does not run them."""
    calls_kernels: ClassVar[bool] = False
    """Whether it calls a kernel library that the user can choose (`verify --kernels`)."""

    files: ClassVar[Mapping[str, str]] = EVERY_GRAPH
    """Stage of a build -> the file it makes, in order."""
    architecture: ClassVar[str] = "any"
    """The manifest's architecture, for a backend that compiles nothing."""
    libraries: ClassVar[tuple[str, ...]] = ()
    """Python packages whose versions go into the manifest, besides those of every build."""
    weight_copies: ClassVar[int] = 1
    """Number of engine files that hold all weights."""
    weight_kinds: ClassVar[tuple[WeightKind, ...]] = ("bf16", "fp16", "fp32")
    """Weight formats that it runs, the recommended one first."""
    refused_weights: ClassVar[Mapping[str, str]] = {"int8": QUANTISED, "int4": QUANTISED, "keep": QUANTISED, "fp8": FP8}
    """Weight format -> why it does not run it."""
    runs_programs: ClassVar[bool] = False
    """Whether it runs engines that exist in memory only."""
    own_settings: ClassVar[tuple[str, ...]] = ("all_logits", "draft_tokens")
    """Build settings that it uses and some other backend does not."""
    every_operator: ClassVar[bool] = False
    """Whether it runs every graph; other backends need a kernel for each operator."""
    prefill_precisions: ClassVar[tuple[PrefillPrecision, ...]] = ("f32",)
    """What `--prefill-precision` may be, the default first."""
    no_proofs: ClassVar[str | None] = None
    """Why its executors do not say which tokens each step reads, which KV proofs need; None if they do."""
    measures_break_even: ClassVar[bool] = False
    """Whether it supports `--dense-until auto`."""

    @abstractmethod
    def probe(self) -> Probe:
        """Return whether it can be used on this machine, and what is missing. Never raises for missing things."""

    def missing(self, parameters: PolicyParameters, layers: int) -> str | None:
        """Return what the policy needs in any of `layers` layers and the backend lacks; None if nothing."""
        missing = missing_graph(parameters, layers)
        return missing if missing is not None or self.every_operator else missing_kernel(parameters, layers)

    def why_no_weights(self, kind: str) -> str:
        """Return why it does not run weights of this format."""
        return self.refused_weights.get(kind, f"{self.name} does not run them")

    def default_weights(self, choice: ModelChoice) -> WeightKind:
        """Return the weight format of a build for which the user gives none."""
        return checkpoint_weights(choice)

    def break_even(self, model: ModelConfig, parameters: PolicyParameters, dtype: str) -> int:
        """Measure `--dense-until auto`: the length up to which a dense step is at least as fast as a sparse one."""
        raise InputError(
            "--dense-until auto is measured on a CPU, which says nothing about a GPU; expected a number of tokens",
            hint="--dense-until TOKENS, or leave it out: the token budget is taken",
        )

    def target(self, resolved: ResolvedBuild) -> Mapping[str, Any]:
        """Return the manifest's `target`; UnsupportedEnvironment if this machine cannot build for it."""
        return self._portable_target

    def target_problem(self, target: Any) -> str | None:
        """Return what is wrong with a manifest's `target`, or None."""
        return None if target == self._portable_target else f"expected {self._portable_target}"

    def makers(self, resolved: ResolvedBuild, source: ModelSource, progress: Progress) -> Makers:
        """Return what makes the file of each stage. Heavy libraries are imported on the first call."""
        left_out = set() if self.no_turns(resolved.parameters) is None else {"extend"}
        return graph_makers(resolved, source, progress, self.files.keys() - left_out)

    def no_turns(self, parameters: PolicyParameters) -> str | None:
        """Return why its engines take no turns of a conversation under this policy; None if they do."""
        return parameters.no_turn if "extend" in self.files else f"backend {self.name} has none"

    def sources(self) -> Iterable[Path]:
        """Return the source files that determine its engines; if one changes, engines are out of date."""
        return ()

    def runs(self, other: Backend) -> bool:
        """Return whether it runs engines that were built for another backend."""
        return False

    def check_options(self, options: RunOptions) -> None:
        """Raise InputError for an option that its executors do not offer."""
        offered, asked = self.prefill_precisions, options.prefill_precision
        if asked not in offered:
            raise InputError(f"prefill precision {asked!r} on {self.name}; expected {' or '.join(offered)}")

    def open(self, engine: EngineDirectory, options: RunOptions, **own: Any) -> Executor:
        """Return an executor of the engine, without loading anything; `own` are options of its executor alone."""
        raise InputError(f"backend {self.name} runs no engines", hint=self.instead)

    def kernels(self, engine: EngineDirectory) -> str | None:
        """Return what computes the engine's `kvc` operators here, in a few words; None if nothing but the backend."""
        return self.without_kernels(engine.model, engine.parameters)

    def without_kernels(self, model: ModelConfig, parameters: PolicyParameters) -> str | None:
        """Return which parts of a policy run slowly for want of a kernel, in a line; None if there are none."""
        return None

    def program_runner(self, weights_directory: Path, options: RunOptions, *, share_prefill: bool) -> ProgramRunner:
        """Return what opens engines in memory over the weights in a directory, if `runs_programs`.

        With `share_prefill`, what the prefills of the same prompts have in common is computed once and kept.
        """
        raise InputError(f"backend {self.name} runs no engines in memory")

    def harness(self, engine: EngineDirectory, options: RunOptions) -> Harness:
        """Return what verification needs of an engine on this backend."""
        raise InputError(f"backend {self.name} runs no engines", hint=self.instead)

    def benchmark(self, engine: EngineDirectory, options: RunOptions) -> Benchmark:
        """Return what profiling needs of an engine on this backend."""
        raise InputError(f"backend {self.name} runs no engines", hint=self.profile_instead)

    def check_verifiable(self, rows: int, what: str) -> None:
        """Raise InputError if an engine of so many rows could be built but not verified."""
        return

    def device_memory(
        self, model: ModelConfig, parameters: PolicyParameters, weights: float, rows: int, gpus: Mapping[str, int]
    ) -> dict[str, Any] | None:
        """Return the modelled GPU memory of an engine as plain data; None if it needs none.

        `model` has the type that the engine computes in, `weights` is the size of one copy of its weights, `gpus` the
        usable bytes of known GPUs.
        """
        return None

    def rank_memory(
        self, model: ModelConfig, parameters: PolicyParameters, rows: int, ranks: int, *, turns: bool
    ) -> dict[str, Any]:
        """Return the modelled GPU memory of each of so many ranks as plain data, if `tensor_parallel` is its setting.

        `model` has the type that the engine computes in.
        """
        raise InputError(f"backend {self.name} runs engines in one process")

    def packed_copies(self, weights: str, size: float, *, drafts: bool) -> tuple[str, ...] | None:
        """Return what packs a copy of an engine's weights in the host's memory; None if engines do not run there.

        `weights` is their format and `size` their bytes; with `drafts`, the engine has a draft graph.
        """
        return None

    @property
    def _portable_target(self) -> dict[str, Any]:
        return {"backend": self.name, "architecture": self.architecture}
