"""The Python build: what a wheel carries where nothing is compiled, and one set of compiler pins for both ways."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from kvc_trt import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[2]
COMPILER = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl")


def backend(call: str, *, shown: bool = False, **environment: str) -> str:
    """The result of a hook of the build backend, run as pip runs it: in the source tree, in a process of its own.

    What else it prints is printed where it is to be `shown`.
    """
    code = f"import scikit_build_core.build as b; print('RESULT', b.{call})"
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("KVC_TRT_CUDA", "KVC_TRT_NATIVE", "LD_PRELOAD")
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    said, result = done.stdout.split("RESULT ")
    if shown:
        print(said)
    return result.strip()


NO_COMPILER = {"CXX": "/no/such/compiler"}


def test_without_a_compiler_the_wheel_is_pure_python_and_says_so(tmp_path: Path, capfd) -> None:
    """It says so to pip's log and `pip -v`; pip alone prints only the name of the wheel, so doctor says it too."""
    name = backend(f"build_wheel({str(tmp_path)!r})", shown=True, **NO_COMPILER)
    assert name == f"kvc_trt-{__version__}-py3-none-any.whl"
    printed = capfd.readouterr().out
    assert "The native operators could not be compiled" in printed
    assert "pip install --force-reinstall --no-deps ." in printed


def test_requesting_native_operators_without_a_compiler_fails_the_build(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        backend(f"build_wheel({str(tmp_path)!r})", KVC_TRT_NATIVE="1", **NO_COMPILER)
    assert list(tmp_path.iterdir()) == []


def test_the_wheel_has_its_data_and_nothing_else(tmp_path: Path) -> None:
    name = backend(f"build_wheel({str(tmp_path)!r})", KVC_TRT_NATIVE="0")
    assert name == f"kvc_trt-{__version__}-py3-none-any.whl"
    files = set(zipfile.ZipFile(tmp_path / name).namelist())
    configurations = {
        f"kvc_trt/{path.relative_to(ROOT)}" for path in (ROOT / "build_configs").rglob("*.yaml")
    }  # fmt: skip
    assert configurations
    assert configurations <= files
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "kvc_trt").rglob("*.py")}
    assert modules <= files
    assert not [file for file in files if file.endswith(".so") or file.startswith(("plugins_cuda", "tests"))]


def test_the_source_distribution_can_build_the_kernels(tmp_path: Path) -> None:
    name = backend(f"build_sdist({str(tmp_path)!r})")
    prefix = name.removesuffix(".tar.gz") + "/"
    with tarfile.open(tmp_path / name) as archive:
        files = {file.removeprefix(prefix) for file in archive.getnames()}
    needed = {"CMakeLists.txt", "pyproject.toml", "plugins_cuda/CMakeLists.txt", "plugins_cuda/cmake/KvcCuda.cmake"}
    needed.add("plugins_cpu/CMakeLists.txt")
    sources = {
        str(path.relative_to(ROOT))
        for folder in ("plugins_cuda", "plugins_cpu")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".cu", ".cuh", ".cpp", ".h")
    }
    assert needed | sources <= files


def test_a_compiler_is_required_only_where_the_cuda_library_is_asked_for() -> None:
    assert "nvidia" not in backend("get_requires_for_build_wheel()")
    asked = backend("get_requires_for_build_wheel()", KVC_TRT_CUDA="1")
    assert all(f"{package}==" in asked for package in COMPILER)


def test_the_wheel_and_the_extra_pin_the_same_compiler() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (override,) = (o for o in project["tool"]["scikit-build"]["overrides"] if "requires" in o.get("build", {}))
    extra = project["project"]["optional-dependencies"]["cuda-build"]
    pins = [pin for pin in extra if pin.partition("==")[0] in COMPILER]
    assert len(pins) == len(COMPILER)
    assert sorted(pins) == sorted(override["build"]["requires"])
