"""The backend of PyTorch around the CUDA kernels, for a GPU without TensorRT, or for any CPU, slowly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvc_trt.backends.base import Backend
from kvc_trt.backends.probes import INSTALL_VERIFY, Probe, import_package, nvidia_gpu
from kvc_trt.backends.torch.parallel.forecast import rank_memory
from kvc_trt.backends.torch.policy_path import policy_path
from kvc_trt.engine.format import WEIGHTS_FILE
from kvc_trt.engine.missing import missing_division, missing_graph
from kvc_trt.engine.program import engine_program
from kvc_trt.errors import InputError
from kvc_trt.kernels.c_library import KernelLibraryError
from kvc_trt.kernels.loading import VARIABLE, library_path, load
from kvc_trt.models.cache_formats import CACHE_FORMATS

if TYPE_CHECKING:
    from kvc_trt.backends.run_options import RunOptions
    from kvc_trt.backends.torch.benchmark import TorchBenchmark
    from kvc_trt.backends.torch.harness import TorchHarness
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.methods.base.parameters import PolicyParameters
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.runtime.executor import Executor


class TorchBackend(Backend):
    """Runs an engine from its weights, without reading its graphs."""

    name = "torch"
    purpose = "NVIDIA GPU through PyTorch and CUDA kernels; any CPU, slowly"
    calls_kernels = True
    libraries = ("torch",)
    cache_formats = tuple(CACHE_FORMATS)
    measures_break_even = True
    own_settings = (*Backend.own_settings, "tensor_parallel")

    @override
    def probe(self) -> Probe:
        """Check for PyTorch; without a GPU and kernels the reference runs in their place, and the probe says so."""
        versions, missing = import_package("torch")
        if missing:
            return Probe(self.name, self.purpose, False, versions, missing, (INSTALL_VERIFY,))
        found, problem = _kernels()
        if found is not None:
            versions["kernels"] = found
        gpu = nvidia_gpu()
        if gpu is not None:
            versions["gpu"] = gpu
        if gpu is None or problem is not None:
            versions["runs on"] = f"the CPU, slowly: no {problem or 'NVIDIA GPU with its driver'}"
        return Probe(self.name, self.purpose, True, versions, (), ())

    @override
    def break_even(self, model: ModelConfig, parameters: PolicyParameters, dtype: str) -> int:
        from kvc_trt.backends.torch.benchmark import break_even

        return break_even(model, parameters, dtype)

    @override
    def missing(self, parameters: PolicyParameters, layers: int) -> str | None:
        """Return the part of the policy that this backend lacks, or None; a missing kernel is none (decision 0026)."""
        return missing_graph(parameters, layers) or missing_division(parameters, layers)

    @override
    def without_kernels(self, model: ModelConfig, parameters: PolicyParameters) -> str | None:
        """Return the parts of the policy that run as PyTorch operations; None if kernels compute all of it."""
        path = policy_path(model, parameters)
        return None if path is None else str(path)

    @override
    def runs(self, other: Backend) -> bool:
        """Return whether the other backend's engines keep their weights in the weight file."""
        return WEIGHTS_FILE in other.files.values()

    @override
    def open(self, engine: EngineDirectory, options: RunOptions, **own: Any) -> Executor:
        """Return an executor on the device of the kernel library in use, or on one such device per rank."""
        ranks = engine.build.tensor_parallel
        if ranks is not None:
            from kvc_trt.backends.torch.parallel.executor import ParallelExecutor
            from kvc_trt.backends.torch.parallel.group import RankGroup

            group = RankGroup(engine.model, engine.weight_file, ranks, threads=options.threads, **own)
            return ParallelExecutor(engine_program(engine), group)
        from kvc_trt.backends.torch.executor import TorchExecutor

        return TorchExecutor(engine, options, **own)

    @override
    def kernels(self, engine: EngineDirectory) -> str | None:
        """Return the number of ranks that share the KV heads, and the parts without kernels; None without either."""
        ranks, without = engine.build.tensor_parallel, super().kernels(engine)
        said = [*(() if ranks is None else (f"{ranks} ranks",)), *(() if without is None else (without,))]
        return "; ".join(said) or None

    @override
    def harness(self, engine: EngineDirectory, options: RunOptions) -> TorchHarness:
        """Return a harness over the weights and the kernels, the nodes where kernels are missing, or the ranks."""
        ranks, by_nodes = engine.build.tensor_parallel, policy_path(engine.model, engine.parameters) is not None
        if ranks is not None:
            from kvc_trt.backends.torch.parallel.harness import ParallelHarness, ParallelNodeHarness

            return (ParallelNodeHarness if by_nodes else ParallelHarness)(engine, ranks, options)
        if by_nodes:
            from kvc_trt.backends.torch.node_harness import NodeHarness

            return NodeHarness(engine, options)
        from kvc_trt.backends.torch.harness import TorchHarness

        return TorchHarness(engine, options)

    @override
    def benchmark(self, engine: EngineDirectory, options: RunOptions) -> TorchBenchmark:
        """Return the benchmark of the kernel library's device; InputError for an engine that runs on several."""
        ranks = engine.build.tensor_parallel
        if ranks is not None:
            raise InputError(
                f"{engine.path} runs on {ranks} ranks (--tp), and profile measures a single process",
                hint="kvc-trt plan --tp says what each rank holds and reads; build without --tp to measure one device",
            )
        from kvc_trt.backends.torch.benchmark import TorchBenchmark

        return TorchBenchmark(engine, options)

    @override
    def rank_memory(
        self, model: ModelConfig, parameters: PolicyParameters, rows: int, ranks: int, *, turns: bool
    ) -> dict[str, Any]:
        return rank_memory(model, parameters, rows, ranks, turns=turns)


def _kernels() -> tuple[str | None, str | None]:
    """Return the kernel library that would be called, and the reason why it cannot run on a GPU, each or None."""
    try:
        place = library_path()
        if place is None:
            return None, f"CUDA kernel library ({VARIABLE} names none, and the package was built without one)"
        library = load(place[0])
    except KernelLibraryError as error:
        return None, f"CUDA kernel library ({error})"
    found = f"{library.path} ({library.executor}, {place[1]})"
    return found, None if library.executor == "cuda" else f"CUDA kernel library ({library.path} is an emulated one)"


BACKEND = TorchBackend()
