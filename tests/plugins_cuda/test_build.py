"""CMake's targets on each kind of machine, its report about the rest, and the rules for every source."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ROOT / "plugins_cuda"


def configure(directory: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["cmake", "-S", str(ROOT), "-B", str(directory), *options]
    ignored = ("CUDACXX", "TENSORRT_ROOT", "LD_PRELOAD")
    inherited = {name: value for name, value in os.environ.items() if name not in ignored}
    return subprocess.run(command, env={**inherited, **environment}, capture_output=True, text=True, check=False)


def summary(output: str) -> dict[str, str]:
    """Return the configure step's lines about each target."""
    return dict(re.findall(r"^--   ([\w, ]+?)  +(.*)$", output, flags=re.MULTILINE))


def old_nvcc(directory: Path) -> Path:
    """Return a program that says it is an nvcc from before sm_100."""
    program = directory / "nvcc"
    program.write_text('#!/bin/sh\necho "Cuda compilation tools, release 11.8, V11.8.89"\n')
    program.chmod(0o755)
    return program


def compile_commands(directory: Path) -> dict[str, list[str]]:
    """Commands by source, relative to plugins_cuda/."""
    found: dict[str, list[str]] = {}
    for entry in json.loads((directory / "compile_commands.json").read_text()):
        found.setdefault(str(Path(entry["file"]).relative_to(PLUGINS)), []).append(entry["command"])
    return found


@pytest.fixture(scope="module")
def host_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("host")
    done = configure(directory, "-DKVC_CUDA=OFF", "-DKVC_CPU=OFF", "-DKVC_SANITIZE=ON")
    assert done.returncode == 0, done.stderr
    return directory


def test_a_machine_without_cuda_builds_the_emulation_and_says_what_is_missing(tmp_path: Path) -> None:
    done = configure(tmp_path, "-DKVC_CUDA=OFF")
    assert done.returncode == 0, done.stderr
    said = summary(done.stdout)
    assert said["kvc_emulation"].startswith("yes")
    assert said["kvc_kernels"] == "no: switched off by KVC_CUDA=OFF"
    assert "NvInferRuntime.h" in said["kvc_plugins"]
    assert "TENSORRT_ROOT" in said["kvc_plugins"]


def test_an_nvcc_too_old_for_sm_100_is_passed_over_with_the_remedy(tmp_path: Path) -> None:
    done = configure(tmp_path / "build", CUDACXX=str(old_nvcc(tmp_path)))
    assert done.returncode == 0, done.stderr
    said = summary(done.stdout)["kvc_kernels"]
    assert "11.8.89" in said
    assert "12.8" in said
    assert "cuda-build" in said


def test_requesting_cuda_where_there_is_none_is_an_error(tmp_path: Path) -> None:
    done = configure(tmp_path / "build", "-DKVC_CUDA=ON", CUDACXX=str(old_nvcc(tmp_path)))
    assert done.returncode != 0
    assert "KVC_CUDA=ON" in done.stderr


def test_headers_without_an_nvcc_build_no_plugins(tmp_path: Path) -> None:
    headers = tmp_path / "include"
    headers.mkdir()
    (headers / "NvInferRuntime.h").touch()
    done = configure(tmp_path / "build", "-DKVC_CUDA=OFF", TENSORRT_ROOT=str(tmp_path))
    assert summary(done.stdout)["kvc_plugins"] == "no: needs kvc_kernels"


def test_every_source_is_in_the_build(host_build: Path) -> None:
    listed = compile_commands(host_build)
    for folder in ("src", "emulation"):
        sources = [path for path in (PLUGINS / folder).iterdir() if path.suffix in (".cu", ".cpp")]
        assert sources
        assert not [path.name for path in sources if f"{folder}/{path.name}" not in listed]
    tensorrt = (PLUGINS / "tensorrt" / "CMakeLists.txt").read_text()
    assert not [path.name for path in (PLUGINS / "tensorrt").glob("*.cpp") if path.name not in tensorrt]


def test_the_emulation_rounds_every_product_and_is_built_without_warnings(host_build: Path) -> None:
    for source, commands in compile_commands(host_build).items():
        for command in commands:
            assert "-ffp-contract=off" in command, source
            assert "-Werror" in command, source
            assert "-ffast-math" not in command, source


def test_the_sanitised_library_stops_at_the_first_error(host_build: Path) -> None:
    commands = compile_commands(host_build)["src/compact.cu"]
    sanitised = [command for command in commands if "-fsanitize=address,undefined" in command]
    assert len(sanitised) == 1
    assert "-fno-sanitize-recover=all" in sanitised[0]


@pytest.fixture(scope="module")
def cuda_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configured build by nvcc, of this machine or of the wheels."""
    directory = tmp_path_factory.mktemp("cuda")
    done = configure(directory, "-DKVC_EMULATION=OFF", "-DKVC_CPU=OFF", VIRTUAL_ENV=sys.prefix)
    assert done.returncode == 0, done.stderr
    said = summary(done.stdout)["kvc_kernels"]
    if said.startswith("no"):
        pytest.skip(f"kvc_kernels {said}")
    return directory


@pytest.mark.slow
def test_nvcc_compiles_for_three_architectures_and_keeps_denormals(cuda_build: Path) -> None:
    commands = compile_commands(cuda_build)
    for source in ("src/compact.cu", "src/hybrid_attention.cu", "src/dense_attention.cu"):
        (command,) = commands[source]
        for architecture in ("sm_80", "sm_90a", "sm_100"):
            assert f"code=[{architecture}]" in command
        assert "ftz" not in command
        assert "fast" not in command


def test_a_spilled_register_stops_the_build(cuda_build: Path, tmp_path: Path) -> None:
    """Uses the library's own flags on a kernel that may use 32 registers and needs more."""
    original = PLUGINS / "src" / "compact.cu"
    entries = json.loads((cuda_build / "compile_commands.json").read_text())
    (entry,) = (entry for entry in entries if entry["file"] == str(original))
    source = tmp_path / "spill.cu"
    live = "\n".join(f"    float v{i} = in[threadIdx.x + {i}];" for i in range(128))
    uses = "\n".join(f"    out[threadIdx.x + {i}] = v{127 - i} * v{i};" for i in range(128))
    source.write_text(
        "__global__ void __launch_bounds__(1024, 2) spill(const float* in, float* out) {\n"
        f"{live}\n    __syncthreads();\n{uses}\n}}\n"
    )
    arguments = shlex.split(entry["command"].replace(str(original), str(source)))
    arguments[arguments.index("-o") + 1] = str(tmp_path / "spill.o")
    arguments = [word for word in arguments if "sm_80" not in word and "sm_100" not in word]
    done = subprocess.run(arguments, cwd=entry["directory"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "spilled to local memory" in done.stdout + done.stderr


@pytest.mark.slow
def test_nvcc_from_the_wheels_configures_where_the_machine_has_none(tmp_path: Path) -> None:
    """The configure step links a program, which finds libcudart only if the wheels' folder is named."""
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.cu13") is None:
        pytest.skip("the wheels of nvcc are not installed; pip install '.[cuda-build]'")
    installed = shutil.which("nvcc")
    hidden = ";".join({"/usr/local/cuda/bin", *([str(Path(installed).parent)] if installed else [])})
    options = ("-DKVC_CUDA=ON", "-DKVC_EMULATION=OFF", f"-DCMAKE_IGNORE_PATH={hidden}")
    done = configure(tmp_path, *options, VIRTUAL_ENV=sys.prefix)
    assert done.returncode == 0, done.stderr
    assert "cu13/bin/nvcc" in summary(done.stdout)["kvc_kernels"]
