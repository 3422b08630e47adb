"""What `--dense-until auto` measures for engines that run in PyTorch: the kernels, on the GPU that the build has."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from kvc_trt.backends.break_even import attention_only, compared, remembered
from kvc_trt.errors import UnsupportedEnvironment

if TYPE_CHECKING:
    import torch

    from kvc_trt.backends.torch.executor import TorchExecutor
    from kvc_trt.methods.parameters import PolicyParameters
    from kvc_trt.models.config import ModelConfig

STATE_BYTES = 2 << 30
"""Caches of many layers: a step then takes long beside what the host adds to it, and no cache of a GPU holds them."""


def break_even(model: ModelConfig, parameters: PolicyParameters, dtype: str) -> int:
    """Return the length in tokens up to which attending densely is at least as fast; from the cache if known.

    UnsupportedEnvironment without a GPU and its kernels: a CPU's reference operators break even elsewhere.
    """
    import torch

    from kvc_trt.backends.torch.device import choose_device
    from kvc_trt.kernels.loading import current_library

    device, library = choose_device(), current_library()
    if device.type != "cuda" or library is None:
        raise UnsupportedEnvironment(
            "--dense-until auto measures the kernels on a GPU for an engine that runs in PyTorch; found neither, and a "
            "CPU says nothing about them",
            hint="--dense-until TOKENS, or leave it out: the token budget is taken",
        )
    identity = {
        "model": dataclasses.asdict(model),
        "parameters": dataclasses.asdict(parameters),
        "dtype": dtype,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(device),
        "kernels": hashlib.sha256(library.path.read_bytes()).hexdigest(),
    }
    return remembered(identity, lambda: measure(model, parameters, dtype, device))


def measure(
    model: ModelConfig, parameters: PolicyParameters, dtype: str, device: torch.device, state_bytes: int = STATE_BYTES
) -> int:
    """Measure on a device, whatever it is."""
    thin = attention_only(model, parameters, dtype, state_bytes)
    return compared(parameters, lambda _, form: _executor(thin, form, dtype, device))


def _executor(model: ModelConfig, parameters: PolicyParameters, dtype: str, device: torch.device) -> TorchExecutor:
    """Random weights and caches; nothing is read from a file."""
    import torch

    from kvc_trt.backends.torch.executor import TorchExecutor
    from kvc_trt.backends.torch.weights import TorchWeights
    from kvc_trt.engine.program import Program
    from kvc_trt.graph.state import state_tensors
    from kvc_trt.models.random_weights import RandomWeights

    state, none = state_tensors(model, parameters, dtype), Path("none")
    weights = TorchWeights.read(model, RandomWeights(model, 0), device, getattr(torch, dtype))
    executor = TorchExecutor(Program(model, parameters, state, none, none, none), weights=weights, device=device.type)
    executor.allocate(1)
    for buffer in executor.state.values():
        buffer.normal_()
    return executor
