"""Switches of the environment that turn one feature of the GPU path off each, so that its gain can be measured alone.

The value 0 turns a feature off. Results do not depend on a switch, but for the rounding of sums in `DEVICE_SAMPLING`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvc_trt.kernels.c_library import CLibrary

OFF = "0"


@dataclass(frozen=True)
class Switch:
    """One feature and its environment variable."""

    variable: str
    feature: str
    """The effect of the feature while it is on."""
    of_library: bool
    """True if the kernel library reads it, once per process (`include/kvc/switches.h`)."""

    @property
    def name(self) -> str:
        """Its name in results."""
        return self.variable.removeprefix("KVC_TRT_").lower()

    @property
    def is_on(self) -> bool:
        """True unless the environment turns the feature off."""
        return os.environ.get(self.variable) != OFF

    @contextmanager
    def off(self, library: CLibrary | None = None) -> Iterator[None]:
        """Turn the feature off in this process, and in `library` if it reads the switch. Nothing may run beside it."""
        before = os.environ.get(self.variable)
        os.environ[self.variable] = OFF
        _read(self, library)
        try:
            yield
        finally:
            if before is None:
                del os.environ[self.variable]
            else:
                os.environ[self.variable] = before
            _read(self, library)


EARLY_LAUNCH = Switch("KVC_TRT_EARLY_LAUNCH", "launches begin while the one before them still runs", True)
CLUSTERS = Switch("KVC_TRT_CLUSTERS", "clusters of blocks score and select for few rows, and select from prompts", True)
CLUSTER_STEP = Switch("KVC_TRT_CLUSTER_STEP", "such clusters also attend, for up to 16 rows", True)
RING = Switch("KVC_TRT_RING", "attention copies two tiles ahead where blocks are few", True)
CARVEOUT = Switch("KVC_TRT_CARVEOUT", "kernels ask for as much shared memory as a multiprocessor can have", True)
WEIGHT_PREFETCH = Switch(
    "KVC_TRT_WEIGHT_PREFETCH", "a captured step reads the next matrices into the L2 cache during attention", False
)
DEVICE_SAMPLING = Switch("KVC_TRT_DEVICE_SAMPLING", "the torch backend draws tokens on its device", False)
SWITCHES = (EARLY_LAUNCH, CLUSTERS, CLUSTER_STEP, RING, CARVEOUT, WEIGHT_PREFETCH, DEVICE_SAMPLING)


def _read(switch: Switch, library: CLibrary | None) -> None:
    if library is not None and switch.of_library:
        library.read_switches()
