"""Between numpy and PyTorch. Their bfloat16 types do not know each other: those go as bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def from_numpy(array: NDArray[Any]) -> Tensor:
    """The array as a tensor on the CPU, in its own memory where that is contiguous and writable."""
    usable = np.require(array, requirements=["C", "W"])
    if usable.dtype.name == "bfloat16":
        return torch.from_numpy(usable.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(usable)


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """The tensor as an array, in its own memory where it is contiguous and on the CPU."""
    here = tensor.detach().cpu()
    if here.dtype != torch.bfloat16:
        found: NDArray[Any] = here.numpy()
        return found
    import ml_dtypes

    bits: NDArray[Any] = here.contiguous().view(torch.int16).numpy()
    return bits.view(ml_dtypes.bfloat16)
