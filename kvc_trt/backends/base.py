"""The base class of backends: one object through which the rest of kvc-trt builds, runs and measures engines.

A backend is one folder, `kvc_trt/backends/<name>/`, whose `backend.py` assigns an object of a subclass to `BACKEND`;
`registry` finds it there. Importing that file imports no heavy library: methods import the libraries that they use.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from kvc_trt.backends.benchmark import Benchmark
from kvc_trt.backends.harness import Harness
from kvc_trt.backends.probes import Probe
from kvc_trt.backends.run_options import PrefillPrecision, RunOptions
from kvc_trt.engine import EngineDirectory
from kvc_trt.engine.backend import BuildBackend
from kvc_trt.engine.program import Program
from kvc_trt.errors import InputError
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.runtime.executor import Executor


class ProgramRunner(Protocol):
    """Opens engines that exist only in memory, over one weight file."""

    def open(self, program: Program) -> Executor:
        """Return an executor of the program, without loading anything."""

    def forget(self) -> None:
        """Drop the values kept of earlier prompts, because the next prompts are others."""


class Backend(BuildBackend):
    """A backend. `BuildBackend` declares the part that builds engines; this class adds the part that runs them."""

    purpose: ClassVar[str]
    """Its purpose in a few words, for doctor's table."""
    automatic: ClassVar[int | None] = None
    """Its place in the order in which `--backend auto` tries backends, smallest first; None if auto never takes it."""
    executes: ClassVar[bool] = True
    """True if it runs engines; a backend that does not only builds them for another program."""
    instead: ClassVar[str | None] = None
    """The program that runs its engines, if it does not run them itself."""
    profile_instead: ClassVar[str | None] = None
    """The program that measures its engines, if it does not run them."""
    calls_kernels: ClassVar[bool] = False
    """True if it calls a kernel library that the user can choose (`verify --kernels`)."""
    runs_programs: ClassVar[bool] = False
    """True if it runs engines that exist in memory only."""
    prefill_precisions: ClassVar[tuple[PrefillPrecision, ...]] = ("f32",)
    """The values of `--prefill-precision`, the default first."""
    no_proofs: ClassVar[str | None] = None
    """The reason why its executors do not report the tokens that each step reads, for KV proofs; None if they do."""

    @abstractmethod
    def probe(self) -> Probe:
        """Return whether it can be used on this machine, and what is missing. Never raises for missing things."""

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
        """Return the code that computes the engine's `kvc` operators, in a few words; None if only the backend does."""
        return self.without_kernels(engine.model, engine.parameters)

    def without_kernels(self, model: ModelConfig, parameters: PolicyParameters) -> str | None:
        """Return a line with the parts of a policy that run slowly for lack of a kernel; None if there are none."""
        return None

    def program_runner(self, weights_directory: Path, options: RunOptions, *, share_prefill: bool) -> ProgramRunner:
        """Return the object that opens engines in memory over the weights in a directory, if `runs_programs`.

        With `share_prefill`, the common part of several engines' prefills of the same prompts is computed once.
        """
        raise InputError(f"backend {self.name} runs no engines in memory")

    def program_benchmark(self, model: ModelConfig, options: RunOptions) -> Benchmark:
        """Return the benchmark of engines in memory, if `runs_programs`; `model` has the type of activations."""
        raise InputError(f"backend {self.name} runs no engines in memory")

    def harness(self, engine: EngineDirectory, options: RunOptions) -> Harness:
        """Return the interface of an engine on this backend for verification."""
        raise InputError(f"backend {self.name} runs no engines", hint=self.instead)

    def benchmark(self, engine: EngineDirectory, options: RunOptions) -> Benchmark:
        """Return the interface of an engine on this backend for profiling."""
        raise InputError(f"backend {self.name} runs no engines", hint=self.profile_instead)

    def check_verifiable(self, rows: int, what: str) -> None:
        """Raise InputError if an engine of this many rows could be built but not verified."""
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
        """Return the modelled GPU memory of each rank as plain data, if `tensor_parallel` is its setting.

        `model` has the type that the engine computes in.
        """
        raise InputError(f"backend {self.name} runs engines in one process")

    def packed_copies(self, weights: str, size: float, *, drafts: bool) -> tuple[str, ...] | None:
        """Return the names of the parts that keep a packed copy of an engine's weights in the host's memory.

        None if engines do not run on the host.

        `weights` is their format and `size` their bytes; with `drafts`, the engine has a draft graph.
        """
        return None
