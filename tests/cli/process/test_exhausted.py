from __future__ import annotations

import errno
import resource
import subprocess
import sys

import pytest

from kvc_trt.cli.process.exhausted import LEAST_ADDRESS_SPACE, exhaustion


def caused(cause: BaseException) -> ImportError:
    error = ImportError("it does not load")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), "too little memory"),
        (MemoryError("Unable to allocate 9 GiB"), "too little memory: Unable to allocate 9 GiB"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device while writing the output"),
        (OSError(errno.EDQUOT, "Quota exceeded", "/a"), "Quota exceeded while writing /a"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        (RuntimeError("can't start new thread"), "no further thread can be started: can't start new thread"),
        (RuntimeError("env.cc:327 Thread(int) pthread_create failed, error: 11"),
         "no further thread can be started: pthread_create failed, error"),
        (RuntimeError("[ONNXRuntimeError] : 1 : FAIL : Status Message: std::bad_alloc"),
         "too little memory: std::bad_alloc"),
        (RuntimeError("arena.cc:360 void* Failed to allocate memory for requested buffer of size 9\n"),
         "too little memory: Failed to allocate memory for requested buffer of size 9"),
        (RuntimeError("[enforce fail at a.cpp:1] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"),
         "too little memory: can't allocate memory"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"),
         "too little memory: failed to map segment from shared object"),
        (caused(MemoryError()), "too little memory"),
    ],
)  # fmt: skip
def test_exhausted_resources_are_one_line_with_exit_code_3(error, expected):
    found = exhaustion(error)
    assert found is not None
    assert (found.message, found.exit_code) == (expected, 3)
    assert found.hint


@pytest.mark.parametrize(
    "error", [ValueError("no memory of it"), FileNotFoundError(errno.ENOENT, "No such file"), KeyError("allocate")]
)
def test_an_ordinary_exception_is_not_reported_as_exhaustion(error):
    assert exhaustion(error) is None


@pytest.mark.parametrize("mebibytes", [32, (LEAST_ADDRESS_SPACE >> 20) - 1])
def test_a_memory_limit_too_low_for_libraries_is_refused_before_they_load(mebibytes):
    done = limited(mebibytes, "policies")
    assert done.returncode == 3
    assert done.stdout == ""
    error, hint = done.stderr.splitlines()
    assert error.startswith(f"error: the limit of this process's memory is {mebibytes}.0 MiB, expected at least 512")
    assert hint == "hint: ulimit -v 524288, or more"


@pytest.mark.parametrize("mebibytes", [614, 698])
def test_a_memory_limit_too_low_for_pytorch_is_refused_before_it_loads(mebibytes, tmp_path):
    done = limited(mebibytes, "verify", "--level", "tasks", "--model", "retrieval-tiny", "--output-dir", str(tmp_path))
    assert done.returncode == 3
    error, hint = done.stderr.splitlines()[-2:]
    expected = (
        f"error: the limit of this process's memory is {mebibytes}.0 MiB, expected at least 1.0 GiB to load torch"
    )
    assert error == expected
    assert hint == "hint: ulimit -v 1048576, or more"


def limited(mebibytes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run kvc-trt with so much address space."""
    limit = mebibytes << 20
    return subprocess.run(
        [sys.executable, "-m", "kvc_trt", *arguments], capture_output=True, text=True, timeout=120, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip
