"""Which TensorRT-LLM is installed, and its builder API where it still has one."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from kvc_trt.backends.tensorrt.lowering.operators import FIRST_FOR_PLUGINS
from kvc_trt.backends.tensorrt.requirements import Packages
from kvc_trt.backends.tensorrt_llm.protocol import BuilderApi
from kvc_trt.errors import UnsupportedEnvironment

LAST_WITH_BUILDER = (1, 2)
INSTALL = "NVIDIA's container tensorrt-llm/release:1.2.1, or pip install 'tensorrt_llm==1.2.1' from NVIDIA's index"
INSTEAD = "kvc-trt build --backend tensorrt, or kvc-trt export llm-api for TensorRT-LLM's own RocketKV"
REMOVAL = "https://nvidia.github.io/TensorRT-LLM/legacy/tensorrt-backend-removal.html"

PACKAGES = Packages(FIRST_FOR_PLUGINS, INSTALL, INSTALL, "pip install cuda-bindings")
"""tensorrt_llm pins its TensorRT, so nothing of `kvc-trt[tensorrt]`, which brings the newest one, is advised here."""


@dataclass(frozen=True)
class Facts:
    """What a probe can tell without importing the package, which would initialise MPI and CUDA."""

    versions: dict[str, str]
    missing: tuple[str, ...]
    hint: str | None
    """The next command, where something is missing."""


def probe() -> Facts:
    """Look at what is installed; nothing is imported."""
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
    """Version of an installed distribution, None where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def removed(version: str) -> str | None:
    """Why this version cannot build engines; None where it can."""
    numbers = version.split(".")[:2]
    if all(part.isdigit() for part in numbers) and tuple(map(int, numbers)) <= LAST_WITH_BUILDER:
        return None
    why = f"its engine builder was removed upstream in July 2026, {REMOVAL}"
    return f"tensorrt_llm 1.2.x or older, found {version} ({why})"


def require_builder() -> str:
    """Version of the installed TensorRT-LLM; UnsupportedEnvironment where it is absent or newer than 1.2."""
    facts = probe()
    if facts.missing:
        raise UnsupportedEnvironment(f"backend tensorrt-llm needs {'; '.join(facts.missing)}", hint=facts.hint)
    return facts.versions["tensorrt_llm"]


def load_builder_api() -> BuilderApi:
    """Import TensorRT-LLM's builder.

    Raises UnsupportedEnvironment where it is absent, newer than 1.2, or does not load.
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
