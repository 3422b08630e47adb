"""The installed TensorRT-LLM, and types for the part of its builder API (up to 1.2) that the adapter calls.

Signatures follow its public source; the package has no type information and is imported on use. Element types are given
by name ("float16"), which its functions accept.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from kvc_trt.backends.tensorrt.lowering.operators import FIRST_FOR_PLUGINS
from kvc_trt.backends.tensorrt.requirements import Packages
from kvc_trt.errors import UnsupportedEnvironment

if TYPE_CHECKING:
    import tensorrt

Shape = Sequence[int]
Ranges = OrderedDict[str, list[Any]]
"""Dimension name -> one entry per optimisation profile: [min, opt, max], or the size of a static dimension."""


class Tensor(Protocol):
    """tensorrt_llm.functional.Tensor: a tensor of the network under construction."""

    trt_tensor: Any

    def __add__(self, other: Tensor | float, /) -> Tensor: ...
    def __sub__(self, other: Tensor | float, /) -> Tensor: ...
    def __mul__(self, other: Tensor | float, /) -> Tensor: ...

    def view(self, shape: Shape | Tensor) -> Tensor:
        """Reshape; in a sequence -1 is inferred and 0 keeps the dimension, a tensor is a shape known at run time."""

    def permute(self, dims: Sequence[int]) -> Tensor:
        """Reorder the dimensions."""

    def split(self, split_size_or_sections: int | Sequence[int], dim: int = 0) -> Sequence[Tensor]:
        """Cut a static dimension into pieces of one size, or of the given sizes."""

    def cast(self, dtype: str) -> Tensor:
        """Convert the elements."""

    def mark_output(self, name: str, dtype: str) -> None:
        """Make it an output of the network."""


class MakeTensor(Protocol):
    """The constructor of Tensor in its two uses: a network input, and a wrapper of TensorRT's own tensor."""

    def __call__(
        self,
        name: str | None = None,
        dtype: str | None = None,
        shape: Shape | None = None,
        dim_range: Ranges | None = None,
        is_network_input: bool = True,
        *,
        network: Any = None,
        trt_tensor: Any = None,
    ) -> Tensor:
        """Make the tensor."""


class Functional(Protocol):
    """tensorrt_llm.functional: functions that add layers to the network of the enclosing net_guard."""

    def constant(self, ndarray: NDArray[Any], as_dtype: Any = None) -> Tensor:
        """Weights; `as_dtype` (tensorrt.DataType) tells types that numpy does not know. The array is kept alive."""

    def embedding(self, input: Tensor, weight: Tensor) -> Tensor:
        """Rows of `weight` at the indices `input`."""

    def matmul(self, input: Tensor, mat2: Tensor, transa: bool = False, transb: bool = False) -> Tensor:
        """Matrix product; float16 is accumulated in fp32."""

    def rms_norm(self, input: Tensor, normalized_shape: int, *, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension, computed in fp32."""

    def silu(self, input: Tensor) -> Tensor:
        """x * sigmoid(x)."""

    def concat(self, inputs: Sequence[Tensor | int], dim: int = 0) -> Tensor:
        """Join tensors; of scalars and integers it makes a shape."""

    def shape(self, input: Tensor, dim: int | None = None) -> Tensor:
        """The shape as an INT64 tensor, or one size of it as a scalar."""

    def arange(self, start: Tensor, end: Tensor, dtype: str) -> Tensor:
        """start, start + 1, ..., end - 1 of two scalars."""

    def expand(self, input: Tensor, expand_shape: Tensor) -> Tensor:
        """Repeat dimensions of size 1."""

    def maximum(self, left: Tensor, right: Tensor | int) -> Tensor:
        """The larger one, element by element."""

    def minimum(self, left: Tensor, right: Tensor | int) -> Tensor:
        """The smaller one, element by element."""

    def gather_nd(self, input: Tensor, indices: Tensor, batch_dims: int = 1) -> Tensor:
        """ONNX GatherND."""

    def select(self, input: Tensor, dim: int, index: int) -> Tensor:
        """The index-th slice of a dimension, which disappears."""


class BuilderConfig(Protocol):
    """tensorrt_llm.BuilderConfig."""

    trt_builder_config: Any
    """tensorrt.IBuilderConfig"""


class Builder(Protocol):
    """tensorrt_llm.Builder."""

    def create_network(self) -> Any:
        """Return an empty, strongly typed tensorrt_llm.Network."""

    def create_builder_config(self, precision: str, *, strongly_typed: bool, profiling_verbosity: str) -> BuilderConfig:
        """Return a configuration without optimisation profiles: those follow from the inputs' ranges."""

    def build_engine(self, network: Any, builder_config: BuilderConfig) -> Any:
        """Return the plan (tensorrt.IHostMemory); AssertionError when TensorRT refuses the network."""


@dataclass(frozen=True)
class BuilderApi:
    """The parts of an installation that the adapter uses."""

    version: str
    functional: Functional
    make_tensor: MakeTensor
    """tensorrt_llm.functional.Tensor"""
    wrap_output: Callable[[Any, Any], Tensor]
    """tensorrt_llm.functional._create_tensor(output, layer), which its own functions call for every layer they add."""
    make_builder: Callable[[], Builder]
    net_guard: Callable[[Any], AbstractContextManager[Any]]
    """Makes a network the one to which functions add layers."""
    default_net: Callable[[], Any]
    """The network of the enclosing net_guard (tensorrt_llm.Network)."""
    default_trtnet: Callable[[], tensorrt.INetworkDefinition]
    """The network as a TensorRT object."""
    tensorrt: Any
    """The tensorrt module."""


LAST_WITH_BUILDER = (1, 2)
INSTALL = "NVIDIA's container tensorrt-llm/release:1.2.1, or pip install 'tensorrt_llm==1.2.1' from NVIDIA's index"
INSTEAD = "kvc-trt build --backend tensorrt, or kvc-trt export llm-api for TensorRT-LLM's own RocketKV"
REMOVAL = "https://nvidia.github.io/TensorRT-LLM/legacy/tensorrt-backend-removal.html"

PACKAGES = Packages(FIRST_FOR_PLUGINS, INSTALL, INSTALL, "pip install cuda-bindings")
"""tensorrt_llm pins its TensorRT, so `kvc-trt[tensorrt]`, which installs the newest one, is not suggested here."""


@dataclass(frozen=True)
class Facts:
    """The findings of a probe that does not import the package, which would initialise MPI and CUDA."""

    versions: dict[str, str]
    missing: tuple[str, ...]
    hint: str | None
    """The next command, if something is missing."""


def probe() -> Facts:
    """Inspect the installed packages without importing them."""
    versions = {name: found for name in ("tensorrt_llm", "tensorrt") if (found := installed(name)) is not None}
    if "tensorrt_llm" not in versions:
        return Facts(versions, ("Python package tensorrt_llm 1.2.x",), INSTALL)
    problem = removed(versions["tensorrt_llm"])
    if problem is not None:
        return Facts(versions, (problem,), INSTEAD)
    if "tensorrt" not in versions:
        return Facts(versions, ("Python package tensorrt",), INSTALL)
    return Facts(versions, (), None)


def installed(package: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def removed(version: str) -> str | None:
    """Return why this version cannot build engines; None if it can."""
    numbers = version.split(".")[:2]
    if all(part.isdigit() for part in numbers) and tuple(map(int, numbers)) <= LAST_WITH_BUILDER:
        return None
    why = f"its engine builder was removed upstream in July 2026, {REMOVAL}"
    return f"tensorrt_llm 1.2.x or older, found {version} ({why})"


def require_builder() -> str:
    """Return the version of the installed TensorRT-LLM; UnsupportedEnvironment if it is missing or newer than 1.2."""
    facts = probe()
    if facts.missing:
        raise UnsupportedEnvironment(f"backend tensorrt-llm needs {'; '.join(facts.missing)}", hint=facts.hint)
    return facts.versions["tensorrt_llm"]


def load_builder_api() -> BuilderApi:
    """Import TensorRT-LLM's builder API.

    Raises UnsupportedEnvironment if it is missing, newer than 1.2, or does not load.
    """
    found = require_builder()
    try:
        package, common, functional, tensorrt = (
            importlib.import_module(name)
            for name in ("tensorrt_llm", "tensorrt_llm._common", "tensorrt_llm.functional", "tensorrt")
        )
    except Exception as error:  # a broken installation raises whatever its loader raises
        reason = " ".join(str(error).split())
        raise UnsupportedEnvironment(
            f"tensorrt_llm {found} is installed, but does not load: {reason}",
            hint="kvc-trt doctor; the package needs the CUDA, MPI and PyTorch that it was built for",
        ) from error
    functional_module: Any = functional
    return BuilderApi(
        found,
        functional_module,
        functional_module.Tensor,
        functional_module._create_tensor,
        package.Builder,
        package.net_guard,
        common.default_net,
        common.default_trtnet,
        tensorrt,
    )
