"""Choose PyTorch's device by the kernel library in use, and convert between arrays and tensors."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.kernels.loading import VARIABLE, current_library

log = logging.getLogger(__name__)
DEVICES = ("auto", "cpu", "cuda")
OLDEST_FOR_CUDA = (2, 8)
"""The first PyTorch version that can return 16-bit products in float32."""


def choose_device(name: str = "auto") -> torch.device:
    """Return a device: `auto` is the kernel library's, or the CPU without one; `cpu` and `cuda` are never replaced.

    InputError for another name; UnsupportedEnvironment, with the missing part, for a GPU that cannot be used.
    """
    if name not in DEVICES:
        raise InputError(f"device {name!r}: expected one of {', '.join(DEVICES)}")
    if name == "cpu":
        return torch.device("cpu")
    device = kernel_device()
    if name == "cuda" and device.type != "cuda":
        library = current_library()
        found = "there is none" if library is None else f"{library.path} is the {library.executor} one"
        hint = f"make plugins, then {VARIABLE}=$PWD/build/libkvc_kernels.so"
        raise UnsupportedEnvironment(f"device cuda needs the CUDA kernel library; {found}", hint=hint)
    return device


def kernel_device() -> torch.device:
    """Return the device of the kernel library in use; without a library the CPU, on which the reference runs."""
    library = current_library()
    if library is None or library.device_type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = torch.version.cuda
        lacking = f"PyTorch {torch.__version__} is built for " + (f"CUDA {built}" if built else "CPUs alone")
        raise UnsupportedEnvironment(
            f"{library.path} runs on a GPU, and PyTorch finds none on this machine: {lacking}",
            hint="nvidia-smi and kvc-trt doctor show the GPUs; pip install torch from the index of a CUDA version, "
            f"or unset {VARIABLE} for the CPU",
        )
    if _version() < OLDEST_FOR_CUDA:
        oldest = ".".join(map(str, OLDEST_FOR_CUDA))
        raise UnsupportedEnvironment(
            f"the torch backend needs PyTorch {oldest} or newer on a GPU, found {torch.__version__}",
            hint="pip install --upgrade torch",
        )
    return torch.device("cuda", torch.cuda.current_device())


def say_if_slow(device: torch.device) -> None:
    """Log one line, once per process and reason, if the CPU runs in place of a GPU."""
    if device.type == "cpu":
        library = current_library()
        kernels = "the reference operators" if library is None else f"the kernels' {library.executor}"
        warn_once(f"torch backend on the CPU, in float32, with {kernels}: this is slow, and meant for checking")


@cache
def warn_once(message: str) -> None:
    """Log a warning, each text once per process."""
    log.warning(message)


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def from_numpy(array: NDArray[Any]) -> Tensor:
    """Return the array as a CPU tensor, which shares its memory if the array is contiguous and writable."""
    usable = np.require(array, requirements=["C", "W"])
    if usable.dtype.name == "bfloat16":
        return torch.from_numpy(usable.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(usable)


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """Return the tensor as an array, which shares its memory if it is contiguous and on the CPU."""
    here = tensor.detach().cpu()
    if here.dtype != torch.bfloat16:
        found: NDArray[Any] = here.numpy()
        return found
    import ml_dtypes

    bits: NDArray[Any] = here.contiguous().view(torch.int16).numpy()
    return bits.view(ml_dtypes.bfloat16)
