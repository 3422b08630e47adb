"""Probe what this machine offers a backend: versions found, what is missing, and the command that installs it.

A probe imports the packages it reports, because an installed package may fail to load.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from kvc_trt.errors import UnsupportedEnvironment

INSTALL_VERIFY = "pip install 'kvc-trt[verify]'"


@dataclass(frozen=True)
class Probe:
    """The result of probing one backend on this machine."""

    name: str
    purpose: str
    usable: bool
    versions: dict[str, str]
    missing: tuple[str, ...]
    install: tuple[str, ...]
    """Commands that install the missing parts, if they can be installed."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "missing": list(self.missing), "install": list(self.install)}


def probe_reference() -> Probe:
    """Probe PyTorch for the reference, which is the oracle of `verify` and not a backend."""
    versions, missing = import_package("torch")
    install = (INSTALL_VERIFY,) if missing else ()
    return Probe("reference", "the oracle that verify compares with", not missing, versions, missing, install)


def require_torch(instead: str | None = None, *, what: str = "verification compares with PyTorch") -> None:
    """Raise UnsupportedEnvironment if PyTorch is missing; to be called before any work.

    `what`, the work that needs it, begins the message; `instead` is an alternative for the hint.
    """
    if not has_torch():
        hint = INSTALL_VERIFY if instead is None else f"{INSTALL_VERIFY}, or {instead}"
        raise UnsupportedEnvironment(f"{what}, which is not installed", hint=hint)


def has_torch() -> bool:
    """Return whether PyTorch is installed; it is not imported."""
    try:
        return importlib.util.find_spec("torch") is not None
    except ModuleNotFoundError:  # a finder refuses it
        return False


def import_package(package: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Import a package; return ({package: its version}, ()), or ({}, (the reason why it cannot be used,))."""
    try:
        module = importlib.import_module(package)
    except Exception as error:  # a broken installation raises whatever its loader raises
        reason = "not installed" if _version(package) is None else f"installed, but does not load: {error}"
        return {}, (f"Python package {package} ({' '.join(reason.split())})",)
    return {package: str(module.__version__)}, ()


def nvidia_gpu() -> str | None:
    """Return the GPU that nvidia-smi reports, which needs only the driver; None if there is none."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.strip().splitlines()[0] if answer.strip() else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
