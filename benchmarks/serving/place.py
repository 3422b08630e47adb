"""The places of the environments, the engines and the working files."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import ROOT
from kvc_trt.backends.onnxruntime.native import NONE, VARIABLE, native_operators


@dataclass(frozen=True)
class Place:
    """Paths of one run."""

    work: Path
    """Engines, repositories, and the output of the tools."""
    triton: Path
    dynamo: Path
    aiperf: Path
    checkpoint: Path | None
    """A file with SmolLM2's weights; None takes the one in the user's cache."""

    def missing(self) -> str | None:
        """Return the command to run where an environment is missing."""
        for environment, target in (
            (self.triton, "triton-env"), (self.dynamo, "dynamo-env"), (self.aiperf, "aiperf-env"),
        ):  # fmt: skip
            if not (environment / "bin" / "python").exists():
                return f"there is no {environment}: make {target}"
        return None

    def variables(self) -> dict[str, str]:
        """Return this process's environment with the operators that it runs itself, for servers and their workers."""
        native = native_operators()
        return {**os.environ, "PYTHONPATH": str(ROOT), VARIABLE: NONE if native is None else str(native.path)}

    def versions(self) -> dict[str, str]:
        """Return the versions of the servers and the tools, as their environments have them."""
        wanted = {
            self.triton: ("nvidia-pytriton", "tritonclient"),
            self.dynamo: ("ai-dynamo", "nixl-cu12"),
            self.aiperf: ("aiperf",),
        }
        found = {"python": platform.python_version()}
        for environment, packages in wanted.items():
            asked = f"from importlib.metadata import version\nfor name in {packages!r}: print(name, version(name))"
            said = subprocess.check_output([environment / "bin" / "python", "-c", asked], text=True)
            found |= dict(line.split() for line in said.splitlines())
        return found
