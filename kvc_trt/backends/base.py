"""What a backend is: one object that answers everything the rest of kvc-trt asks of it.

A backend lives in one folder, `kvc_trt/backends/<name>/`, whose `backend.py` assigns an object of a subclass to
`BACKEND`; `registry` finds it there. Importing that file imports no heavy library: methods import what they use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from kvc_trt.backends.benchmark import Benchmark
from kvc_trt.backends.harness import Harness
from kvc_trt.backends.probes import Probe
from kvc_trt.engine import EngineDirectory
from kvc_trt.engine.build import Makers
from kvc_trt.engine.format import GRAPH_FILES
from kvc_trt.engine.graph_stages import graph_makers
from kvc_trt.engine.model_choice import ModelChoice, ModelSource
from kvc_trt.engine.resolved_build import ResolvedBuild, WeightKind, checkpoint_weights
from kvc_trt.engine.supported import missing_graph, missing_kernel
from kvc_trt.errors import InputError
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.progress import Progress
from kvc_trt.runtime.executor import Executor

QUANTISED = "weights are quantised for ONNX Runtime, whose operator no other backend has"
FP8 = "TensorRT alone multiplies matrices in fp8; any other kind is made of them when an fp8 checkpoint is read"


class Backend(ABC):
    """One backend. The defaults are those of one that compiles nothing: it runs the graphs' weights as they are."""

    name: ClassVar[str]
    """As the user and config.json write it: the folder's name, a hyphen for every underscore."""
    purpose: ClassVar[str]
    """What it is for, in a few words: doctor's table."""
    automatic: ClassVar[int | None] = None
    """Its place among those that `--backend auto` tries, the smallest first; None: it is taken only when asked for."""
    executes: ClassVar[bool] = True
    """Whether it runs engines, its own and maybe others'; one that does not builds them for somebody else."""
    instead: ClassVar[str | None] = None
    """Where it does not run its engines: what does."""
    profile_instead: ClassVar[str | None] = None
    """Where it does not run its engines: what measures them."""
    calls_kernels: ClassVar[bool] = False
    """Whether it calls a kernel library that the user may name (`verify --kernels`)."""

    files: ClassVar[Mapping[str, str]] = GRAPH_FILES
    """Stage of a build -> the one file that it makes, in order."""
    architecture: ClassVar[str] = "any"
    """What the manifest names as architecture, for a backend that compiles nothing."""
    libraries: ClassVar[tuple[str, ...]] = ()
    """Python packages whose versions go into the manifest, besides those of every build."""
    weight_copies: ClassVar[int] = 1
    """How many of the files hold all weights."""
    weight_kinds: ClassVar[tuple[WeightKind, ...]] = ("bf16", "fp16", "fp32")
    """Kinds of weights that it runs, the one to advise first."""
    refused_weights: ClassVar[Mapping[str, str]] = {"int8": QUANTISED, "int4": QUANTISED, "fp8": FP8}
    """Kind of weights -> why it does not run them."""
    own_settings: ClassVar[tuple[str, ...]] = ()
    """Settings of a build that mean something to it and to no other backend."""
    every_operator: ClassVar[bool] = False
    """Whether it runs whatever a graph can be written for; one that does not needs a kernel for each operator."""
    measures_break_even: ClassVar[bool] = False
    """Whether `--dense-until auto` means something to it."""

    @abstractmethod
    def probe(self) -> Probe:
        """Say whether it can be used on this machine, and what is missing. Never raises for what is not there."""

    def missing(self, parameters: PolicyParameters, layers: int) -> str | None:
        """What it lacks that the policy needs in some of `layers` layers; None where it has everything."""
        missing = missing_graph(parameters, layers)
        return missing if missing is not None or self.every_operator else missing_kernel(parameters, layers)

    def why_no_weights(self, kind: str) -> str:
        """Why it does not run a kind of weights."""
        return self.refused_weights.get(kind, f"{self.name} does not run them")

    def default_weights(self, choice: ModelChoice) -> WeightKind:
        """The kind of weights that a build takes where the user names none."""
        return checkpoint_weights(choice)

    def break_even(self, model: ModelConfig, parameters: PolicyParameters, dtype: str) -> int:
        """Measure `--dense-until auto`: the length up to which a dense step is at least as fast as a sparse one."""
        raise InputError(
            "--dense-until auto is measured on a CPU, which says nothing about a GPU; expected a number of tokens",
            hint="--dense-until TOKENS, or leave it out: the token budget is taken",
        )

    def target(self, resolved: ResolvedBuild) -> Mapping[str, Any]:
        """`target` of the manifest; UnsupportedEnvironment where this machine cannot build for it."""
        return self._portable_target

    def target_problem(self, target: Any) -> str | None:
        """What is wrong with `target` of a manifest; None if nothing is."""
        return None if target == self._portable_target else f"expected {self._portable_target}"

    def makers(self, resolved: ResolvedBuild, source: ModelSource, progress: Progress) -> Makers:
        """What makes each stage's file. Heavy libraries are imported when the first is called."""
        return graph_makers(resolved, source, progress)

    def sources(self) -> Iterable[Path]:
        """Its sources that decide what is in its engines: where one changes, an engine is not up to date."""
        return ()

    def runs(self, other: Backend) -> bool:
        """Whether it runs engines that were built for another backend."""
        return False

    def open(self, engine: EngineDirectory, *, threads: int | None = None, **options: Any) -> Executor:
        """An executor of the engine; nothing is loaded yet. `threads` None leaves the number to it."""
        raise InputError(f"backend {self.name} runs no engines", hint=self.instead)

    def harness(self, engine: EngineDirectory, threads: int | None) -> Harness:
        """What verification needs of an engine here."""
        raise InputError(f"backend {self.name} runs no engines", hint=self.instead)

    def benchmark(self, engine: EngineDirectory, threads: int) -> Benchmark:
        """What profiling needs of an engine here."""
        raise InputError(f"backend {self.name} runs no engines", hint=self.profile_instead)

    def check_verifiable(self, rows: int, what: str) -> None:
        """InputError where an engine of so many rows can be built and not verified, said before it is built."""
        return

    def device_memory(
        self, model: ModelConfig, parameters: PolicyParameters, weights: float, rows: int, gpus: Mapping[str, int]
    ) -> dict[str, Any] | None:
        """The GPU memory of an engine before there is one, as plain data; None where it needs none of its own.

        `model` has the type that the engine computes in, `weights` is the size of one copy of its weights, `gpus` the
        usable bytes of known GPUs.
        """
        return None

    @property
    def _portable_target(self) -> dict[str, Any]:
        return {"backend": self.name, "architecture": self.architecture}
