"""Which TensorRT-LLM is installed, and its builder API where it still has one."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from kvc_trt.backends.tensorrt_llm.protocol import BuilderApi
from kvc_trt.errors import UnsupportedEnvironment

LAST_WITH_BUILDER = (1, 2)
INSTALL = "pip install 'tensorrt_llm==1.2.1' --extra-index-url https://pypi.nvidia.com, or NVIDIA's container 1.2.1"
INSTEAD = "kvc-trt build --backend tensorrt, or kvc-trt export llm-api for TensorRT-LLM's own RocketKV"
REMOVAL = "https://nvidia.github.io/TensorRT-LLM/legacy/tensorrt-backend-removal.html"
LIBRARY_VARIABLE = "KVC_TRT_PLUGINS"
PACKAGED_LIBRARY = Path(__file__).resolve().parents[2] / "lib" / "libkvc_plugins.so"


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
    return Facts(versions, () if "tensorrt" in versions else ("Python package tensorrt",), INSTALL)


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


def load_builder_api() -> BuilderApi:
    """Import TensorRT-LLM's builder.

    Raises UnsupportedEnvironment where it is absent, newer than 1.2, or does not load.
    """
    facts = probe()
    if facts.missing:
        raise UnsupportedEnvironment(f"backend tensorrt-llm needs {'; '.join(facts.missing)}", hint=facts.hint)
    try:
        package, common, functional, tensorrt = (
            importlib.import_module(name)
            for name in ("tensorrt_llm", "tensorrt_llm._common", "tensorrt_llm.functional", "tensorrt")
        )
    except Exception as error:  # a broken installation raises whatever its loader raises
        found = " ".join(str(error).split())
        raise UnsupportedEnvironment(
            f"tensorrt_llm {facts.versions['tensorrt_llm']} is installed, but does not load: {found}",
            hint="kvc-trt doctor; the package needs the CUDA, MPI and PyTorch that it was built for",
        ) from error
    functional_module: Any = functional
    return BuilderApi(
        facts.versions["tensorrt_llm"],
        functional_module,
        functional_module.Tensor,
        functional_module._create_tensor,
        package.Builder,
        package.net_guard,
        common.default_net,
        common.default_trtnet,
        tensorrt,
    )


def plugin_library() -> Path:
    """The library with our plugins: KVC_TRT_PLUGINS, or the package's own."""
    named = os.environ.get(LIBRARY_VARIABLE)
    path = Path(named) if named else PACKAGED_LIBRARY
    if named and not path.is_absolute():
        raise UnsupportedEnvironment(f"{LIBRARY_VARIABLE} is {named!r}; expected an absolute path")
    if not path.is_file():
        raise UnsupportedEnvironment(
            f"no TensorRT plugin library at {path}",
            hint=f"`make plugins` with TENSORRT_ROOT builds it; {LIBRARY_VARIABLE} names one that lies elsewhere",
        )
    return path
