"""The packages that the GPU's day needs beside torch and numpy, and their wheels.

Versions are those of the environment that makes the bundle, with which the tests passed.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NEEDED = (
    "click", "hypothesis", "ml_dtypes", "psutil", "pydantic", "pytest", "pytest-xdist", "pyyaml", "rich", "safetensors",
    "tokenizers",
)  # fmt: skip
"""Packages that the parts of a GPU's day import. tests/benchmarks/test_gpu_bundle.py runs them with nothing else."""
PRESENT = ("numpy", "torch")
"""Packages that the machine brings, with their own requirements."""
LEFT_OUT = ("huggingface-hub",)
"""Requirements that no package imports; with huggingface-hub, tokenizers would fetch a tokenizer by its name."""
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 17, 12)), "manylinux2014_x86_64", "manylinux2010_x86_64",
)  # fmt: skip


def closure(names: Sequence[str], python: str) -> dict[str, str]:
    """Package -> version of `names` and of all that they need under a Python "3.x", without what is present."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    found: dict[str, str] = {}
    waiting = [Requirement(name) for name in names]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found or name in (*PRESENT, *LEFT_OUT) or not _applies(requirement, environment):
            continue
        found[name] = metadata.version(name)
        waiting += [Requirement(text) for text in metadata.requires(name) or ()]
    return found


def _applies(requirement: Requirement, environment: dict[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate(environment)


def download(pythons: Sequence[str], folder: Path) -> None:
    """Put the wheels for each Python into `folder`. Raises RuntimeError where a wheel cannot be had."""
    folder.mkdir(parents=True, exist_ok=True)
    for python in pythons:
        _download(python, [f"{name}=={version}" for name, version in closure(NEEDED, python).items()], folder)
    for path in folder.glob("*.whl"):
        _check(path)


def _download(python: str, requirements: Sequence[str], folder: Path) -> None:
    platforms = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms,
        "--dest", str(folder), *requirements,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip download for Python {python} ended with {done.returncode}:\n{done.stderr[-2000:]}")


def _check(path: Path) -> None:
    """Raises RuntimeError for a wheel that unpacking alone does not install."""
    with zipfile.ZipFile(path) as wheel:
        elsewhere = [name for name in wheel.namelist() if ".data/purelib/" in name or ".data/platlib/" in name]
    if elsewhere:
        raise RuntimeError(f"{path.name} cannot be used by unpacking it: {elsewhere[0]}")
