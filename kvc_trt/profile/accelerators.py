"""Published figures of GPUs, in one table, and GPUs that a user describes by three figures."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvc_trt.errors import InputError, did_you_mean
from kvc_trt.sizes import bandwidth_of

USABLE_MEMORY = 0.9
"""Share of the memory for weights and caches; the rest is workspace and fragmentation."""


@dataclass(frozen=True)
class Accelerator:
    """The figures of one GPU that a floor follows from."""

    name: str
    bandwidth: float
    """Memory bandwidth, bytes per second."""
    memory: float
    """Memory in bytes."""
    flops_16bit: float
    """Dense matrix throughput in fp16 or bf16 with sums in fp32, operations per second."""
    flops_fp8: float | None = None
    """Dense matrix throughput in fp8; None where the GPU has none, or it was not given. No floor uses it: engines with
    fp8 weights widen them and multiply in 16 bits."""
    source: str = "given"
    """The source of the figures."""

    @property
    def usable(self) -> int:
        """The bytes of memory for weights and caches."""
        return round(USABLE_MEMORY * self.memory)


H100 = Accelerator("H100", 3.35e12, 80e9, 989e12, 1979e12, "NVIDIA H100 data sheet, SXM5")
H200 = Accelerator("H200", 4.8e12, 141e9, 989e12, 1979e12, "NVIDIA H200 data sheet, SXM5")
A100 = Accelerator("A100", 2.039e12, 80e9, 312e12, None, "NVIDIA A100 data sheet, 80 GB SXM4")
L40S = Accelerator("L40S", 0.864e12, 48e9, 362e12, 733e12, "NVIDIA L40S data sheet")
B200 = Accelerator("B200", 8e12, 180e9, 2250e12, 4500e12, "NVIDIA DGX B200 data sheet, an eighth of it")
RTX_PRO_6000 = Accelerator(
    "RTX PRO 6000", 1.792e12, 96e9, 503.8e12, 1007.6e12,
    "NVIDIA RTX Blackwell PRO architecture paper, Workstation Edition",
)  # fmt: skip

HOPPER = (H100, H200)
"""The GPUs that are shown where none is named."""
ACCELERATORS = {"h100": H100, "h200": H200, "a100": A100, "l40s": L40S, "b200": B200, "rtx-pro-6000": RTX_PRO_6000}
"""GPUs by the names that `--gpu` takes."""

_GIVEN = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9 ._-]{0,31})=([^,]+),([^,]+),([^,]+)")
_NUMBER = re.compile(r"[0-9]{1,7}(\.[0-9]{1,6})?")


def accelerator(text: str) -> Accelerator:
    """Return the GPU of a name such as `h100`, or of `NAME=bandwidth,TFLOPS,GiB`; InputError for anything else.

    >>> accelerator("mine=900GB/s,120,24").memory == 24 * 2**30
    True
    """
    found = ACCELERATORS.get(text.strip().lower())
    if found is not None:
        return found
    example = "--gpu mine=900GB/s,120,24 (memory bandwidth, dense 16-bit TFLOPS, GiB)"
    if "=" not in text:
        known = ", ".join(ACCELERATORS)
        raise InputError(
            f"unknown GPU {text!r}{did_you_mean(text.lower(), ACCELERATORS)}", hint=f"{known}, or {example}"
        )
    given = _GIVEN.fullmatch(text)
    numbers = [] if given is None else [given[3].strip(), given[4].strip()]
    bandwidth = None if given is None else bandwidth_of(given[2])
    valid = all(_NUMBER.fullmatch(number) and float(number) > 0 for number in numbers)
    if given is None or bandwidth is None or not valid:
        raise InputError(f"{text!r} is no GPU; expected NAME=bandwidth,TFLOPS,GiB", hint=example)
    return Accelerator(given[1].strip(), bandwidth, float(numbers[1]) * 2**30, float(numbers[0]) * 1e12)
