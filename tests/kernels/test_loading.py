"""The sources of a library: the caller, one environment variable, the package. Nothing else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvc_trt.backends.registry import backend
from kvc_trt.kernels import KernelLibraryError, loading, use_library
from tests.kernels.double import compile_double


@pytest.fixture
def path(double):
    return double.path


def test_no_library_is_loaded_by_default():
    assert loading.library_path() is None
    assert loading.current_library() is None


def test_the_environment_variable_names_the_library(path, monkeypatch):
    monkeypatch.setenv(loading.VARIABLE, str(path))
    assert loading.library_path() == (path, "KVC_TRT_KERNELS")
    assert loading.current_library().path == path


def test_a_library_in_the_package_is_found(path, monkeypatch):
    monkeypatch.setattr(loading, "PACKAGED", path)
    assert loading.library_path() == (path, "part of the package")


def test_use_library_overrides_the_environment_within_its_block(path, monkeypatch, tmp_path):
    monkeypatch.setenv(loading.VARIABLE, str(tmp_path / "unused.so"))
    other = compile_double(tmp_path)
    with use_library(path) as outer:
        assert loading.current_library() is outer
        with use_library(other) as inner:
            assert (inner.path, loading.current_library()) == (other, inner)
        assert loading.current_library() is outer
        with pytest.raises(KernelLibraryError), use_library(tmp_path / "absent.so"):
            pass
        assert loading.current_library() is outer
    assert loading.library_path() == (tmp_path / "unused.so", "KVC_TRT_KERNELS")


@pytest.mark.parametrize("name", ["libdouble.so", "./libdouble.so"])
def test_neither_the_working_directory_nor_the_loaders_path_is_searched(name, path, monkeypatch):
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(path.parent))
    assert loading.library_path() is None
    monkeypatch.setenv(loading.VARIABLE, name)
    with pytest.raises(KernelLibraryError, match="expected an absolute path"):
        loading.library_path()


def test_a_missing_library_is_an_error_and_not_the_reference(monkeypatch, tmp_path):
    monkeypatch.setenv(loading.VARIABLE, str(tmp_path / "absent.so"))
    with pytest.raises(KernelLibraryError, match=r"absent\.so: no kernel library there"):
        loading.current_library()


def test_doctor_names_the_kernel_library(path, monkeypatch, tmp_path):
    def versions() -> dict[str, str]:
        return backend("torch").probe().versions

    assert "KVC_TRT_KERNELS names none" in versions()["runs on"]
    monkeypatch.setenv(loading.VARIABLE, str(path))
    assert versions()["kernels"] == f"{path} (emulation, KVC_TRT_KERNELS)"
    assert "is an emulated one" in versions()["runs on"]
    monkeypatch.setenv(loading.VARIABLE, str(tmp_path / "absent.so"))
    assert "kernels" not in versions()
    assert "no kernel library there" in versions()["runs on"]
    monkeypatch.setenv(loading.VARIABLE, os.fspath(compile_double(tmp_path, executor="cuda")))
    assert "(cuda, KVC_TRT_KERNELS)" in versions()["kernels"]
    assert "kernel library" not in versions().get("runs on", "")


def test_kernels_and_registry_do_not_import_pytorch():
    code = (
        "import sys, kvc_trt.kernels, kvc_trt.backends.registry as found, kvc_trt.cli.commands.verify;"
        "found.backends();"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "False"


def test_calls_by_address_need_no_pytorch(path):
    """A process that runs engines with the Python plugins has no other use for it."""
    code = (
        "import sys, kvc_trt.backends.tensorrt.python_plugins, kvc_trt.kernels.loading as loading\n"
        "library = loading.current_c_library()\n"
        "print(library.executor, library.path, 'torch' in sys.modules)\n"
    )
    environment = os.environ | {loading.VARIABLE: str(path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["emulation", str(path), "False"]
