"""The bundle of a GPU's day: its contents, the parts that are unpacked, and that it lacks nothing but a GPU.

A bare machine (bare_machine.py) shows the last point: every part runs to its end there on the emulated kernels;
without them the script stops where it asks for a GPU.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import packaging
import pytest

from benchmarks import machine
from benchmarks.bundle import make, unpack, wheels
from kvc_trt.kernels.library import KernelLibrary
from tests.benchmarks import bare_machine
from tests.benchmarks.bare_machine import BareMachine
from tests.plugins_cuda import build

TAG = sys.implementation.cache_tag
THIS = f"cp{sys.version_info[0]}{sys.version_info[1]}"
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
COMPARED = "tests/kernels/test_ops.py tests/backends/torch/test_on_a_gpu.py"
"""A file of each folder but that of the kernels, whose test of every kernel is what the part `sanitize` runs."""


# ---- Wheels


def wheel(folder: Path, name: str, tags: str, content: str = "") -> None:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-{tags}.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", content)


@pytest.fixture
def folder(tmp_path):
    """Wheels, with that of `packaging`, by which the others are chosen."""
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "packaging-1.0-py3-none-any.whl", "w") as archive:
        for path in Path(packaging.__file__).parent.glob("*.py"):
            archive.write(path, f"packaging/{path.name}")
    return tmp_path / "wheels"


@pytest.fixture(autouse=True)
def _same_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_the_wheel_that_fits_best_is_unpacked(folder, tmp_path):
    wheel(folder, "fast", "py3-none-any", "slow = True")
    wheel(folder, "fast", f"{THIS}-{THIS}-manylinux_2_17_x86_64", "slow = False")
    wheel(folder, "fast", "cp39-cp39-manylinux_2_17_x86_64", "slow = None")
    target = unpack.unpack(folder, tmp_path / "site")
    assert target == tmp_path / "site" / TAG
    assert (target / "fast" / "__init__.py").read_text() == "slow = False"
    assert unpack.unpack(tmp_path / "nowhere", tmp_path / "site") == target


def test_packages_without_a_wheel_are_the_machines_own_or_an_error(folder, tmp_path, capsys):
    wheel(folder, "pytest", "cp39-cp39-manylinux_2_17_x86_64")
    assert not (unpack.unpack(folder, tmp_path / "site") / "pytest").exists()
    wheel(folder, "not_there", "cp39-cp39-manylinux_2_17_x86_64")
    assert unpack.main([str(folder), str(tmp_path / "other")]) == unpack.CANNOT
    assert f"no wheel for Python {PYTHON}" in (told := capsys.readouterr().err)
    assert "not installed: not-there; set PY" in told
    assert list((tmp_path / "other").glob("*")) == []


def test_the_wheels_are_those_of_this_environment_without_what_the_machine_brings():
    found = wheels.closure(wheels.NEEDED, PYTHON)
    assert set(wheels.NEEDED) >= {"pydantic", "pytest"}
    assert {"pydantic-core", "iniconfig", "packaging"} <= found.keys()
    assert not found.keys() & {"numpy", "torch"}
    assert found["pytest"] == pytest.__version__
    assert wheels.closure(["pytest"], PYTHON).items() < found.items()


# ---- The contents of the bundle


def test_the_tree_of_the_bundle_is_tracked_and_small():
    files = make.tracked(machine.ROOT)
    assert {Path("benchmarks/gpu_day.sh"), Path("pyproject.toml"), Path("tests/conftest.py")} <= set(files)
    assert not [
        path for path in files if path.is_relative_to("benchmarks/results") or path.is_relative_to("docs/images")
    ]
    assert sum((machine.ROOT / path).stat().st_size for path in files) < 10_000_000


def test_a_folder_that_is_no_bundle_is_not_replaced(tmp_path, capsys):
    (tmp_path / "kept").write_text("")
    assert make.main([str(tmp_path), "--library", "none.so"]) == 3
    assert "is no bundle; it is not replaced" in capsys.readouterr().err
    assert (tmp_path / "kept").exists()


def test_results_of_the_bundle_name_the_commit_that_it_was_made_of(tmp_path, monkeypatch):
    """The commit is right even where the bundle lies inside the checkout of something else."""
    (tmp_path / "COMMIT").write_text("0123456789ab\n")
    monkeypatch.setattr(machine, "COMMIT", tmp_path / "COMMIT")
    assert machine.commit() == "0123456789ab"


# ---- On a bare machine


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A bare machine with the bundle in its folder, without nvcc's outputs, and with the emulated kernels."""
    if reason := bare_machine.missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("bare")
    found = BareMachine(folder)
    (folder / "libkvc_kernels.so").write_text("no GPU will ask for it")
    day = found.root / "day"
    day.rmdir()
    try:
        make.write(day, folder / "libkvc_kernels.so", [PYTHON])
    except RuntimeError as error:
        if "pip download" not in str(error):
            raise
        pytest.skip(f"the wheels cannot be had: {error}")
    shutil.copy(build.emulation(), found.root / "out")
    return found


@pytest.mark.slow
def test_on_a_bare_machine_nothing_but_the_gpu_is_missing(bare):
    for absent in ("import pydantic", "import onnx", "import yaml"):
        done = bare.run(f'python3 -c "{absent}"')
        assert "ModuleNotFoundError" in done.stderr
    assert bare.run("git --version").returncode == 127
    done = bare.run("sh gpu_day.sh")
    assert (done.returncode, done.stderr) == (3, "error: no GPU: nothing was built, compared or timed\n")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_compared_files_are_all_that_have_tests_for_a_gpu(bare):
    """Collects from the bundle with its own packages, and from this tree with all packages."""
    command = ["-m", "pytest", "-m", "gpu", "--collect-only", "-q"]
    here = subprocess.run(
        [sys.executable, *command, "tests/kernels", "tests/backends", "tests/plugins_cuda", "tests/runtime"],
        cwd=machine.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    files = "tests/kernels/test_ops.py tests/backends/torch/test_on_a_gpu.py tests/plugins_cuda/test_*.py"
    there = bare.run(f"PYTHONPATH=.:build/site/{TAG} python3 {' '.join(command)} {files}")
    collected = [{line for line in done.stdout.splitlines() if "::" in line} for done in (here, there)]
    assert there.returncode == 0, there.stdout + there.stderr
    assert collected[0] == collected[1] != set()


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("part", ["compare", "engine", "kernels", "torch", "counters", "sanitize"])
def test_each_part_runs_to_its_end_on_the_emulated_kernels(bare, part):
    shutil.rmtree(bare.root / "out" / part, ignore_errors=True)
    day = f'COMPARED="{COMPARED}" sh gpu_day.sh --emulated /out/libkvc_emulation.so --out /out/{part} {part}'
    done = bare.run(day)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing that follows was run or measured on a GPU" in done.stdout
    results = list((bare.root / "out" / part).glob("*"))
    assert all("-emulated." in path.name for path in results)
    for path in results:
        if path.suffix == ".json":
            check_that_nothing_is_taken_for_a_measurement(json.loads(path.read_text()))
        else:
            suite = ElementTree.parse(path).getroot()[0]
            assert int(suite.get("tests")) > int(suite.get("skipped")) > 0
            assert (suite.get("failures"), suite.get("errors")) == ("0", "0")
    assert results or part == "sanitize"


def check_that_nothing_is_taken_for_a_measurement(document):
    assert (document["device"]["gpu"], document["machine"]["commit"]) == (None, machine.commit())
    assert "nothing was measured" in document["device"]["emulated"]
    entries = [entry for part in document.values() if isinstance(part, list) for entry in part]
    assert entries
    for entry in entries:
        assert entry["name"] == "verify" or "not_measured" in entry
        assert entry.get("passed", True)


def test_the_emulation_is_refused_as_a_gpus_library(emulated_library, monkeypatch, capsys):
    from benchmarks.gpu import choice
    from benchmarks.kernels import __main__ as kernels

    monkeypatch.setenv("KVC_TRT_KERNELS", str(emulated_library.path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(SystemExit) as refused:
        kernels.main([])
    assert refused.value.code == choice.CANNOT
    assert "of executor emulation; `make plugins`" in capsys.readouterr().err


@pytest.fixture
def emulated_library() -> KernelLibrary:
    return KernelLibrary(build.emulation())


@pytest.mark.parametrize(
    ("found", "refused"), [(("glibc", "2.31"), True), (("glibc", "2.34"), False), (("musl", ""), False)]
)
def test_a_machine_with_an_older_glibc_is_told_first(found, refused, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("platform.libc_ver", lambda: found)
    if not refused:
        assert unpack.too_old() is None
        return
    assert unpack.main([str(tmp_path), str(tmp_path / "site")]) == unpack.CANNOT
    told = capsys.readouterr().err
    assert told == (
        "error: the kernels need glibc 2.34 or newer (Ubuntu 22.04, RHEL 9), found 2.31; take a newer machine\n"
    )
