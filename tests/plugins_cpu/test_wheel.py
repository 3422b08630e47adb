"""The wheel where it is installed: native operators without a compiler, without PyTorch, and without a checkout."""

from __future__ import annotations

import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from threading import Timer
from typing import Any
from urllib.request import Request, urlopen

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvc_trt import __version__
from tests.plugins_cpu.libraries import built
from tests.plugins_cuda import build
from tests.plugins_cuda.test_build_python import backend

pytestmark = pytest.mark.slow

AGAIN = """#!/bin/sh
for word in "$@"; do
    case "$last" in -o) made="{folder}/$word" target="$word" ;; esac
    last=$word
done
case "$target" in *.o) [ -e "$made" ] && exec cp "$made" "$target" ;; esac
exec c++ "$@"
"""
"""A compiler that takes the objects of `folder`, where CMake has made them of the same sources by the same commands."""
DEMO = ("--model", "retrieval-tiny", "--policy", "rocketkv", "--token-budget", "64")
ANSWER = "scarlet bear hanoi fourteen"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, linked of the objects of the library that the other tests run: compiling them takes minutes."""
    folder, library = tmp_path_factory.mktemp("wheel"), built()
    assert isinstance(library, Path), library
    compiler = folder / "c++"
    compiler.write_text(AGAIN.format(folder=library.parent))
    compiler.chmod(0o700)
    settings = {"build-dir": str(folder / "build")}
    name = backend(f"build_wheel({str(folder)!r}, {settings!r})", KVC_TRT_NATIVE="1", CXX=str(compiler))
    own, others = (_commands(built_in) for built_in in (folder / "build", library.parent))
    assert own == {file: others.get(file) for file in own}
    return folder / name


def _commands(folder: Path) -> dict[str, list[str]]:
    """Options and source of each object of the native operators. That warnings are errors is left out: in a wheel they
    are none."""
    commands = {}
    for one in json.loads((folder / "compile_commands.json").read_text()):
        object_file = str((folder / one["output"]).relative_to(folder))
        if object_file.startswith("plugins_cpu/CMakeFiles/kvc_cpu"):
            words = [word for word in shlex.split(one["command"])[1:] if word != "-Werror"]
            made = words.index("-o")  # from another folder by make than by ninja
            commands[object_file] = words[:made] + words[made + 2 :]
    assert commands
    return commands


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment: the wheel is installed by pip, what it asks for are links to what this Python has."""
    folder = tmp_path_factory.mktemp("installed") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = _packages(folder)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)], check=True)
    own = next(iter(packages.glob("kvc_trt-*.dist-info")))
    for one in _needed(metadata.Distribution.at(own).requires or ()):
        for top in {file.parts[0] for file in one.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (packages / top).exists():
                (packages / top).symlink_to(str(one.locate_file(top)))
    return folder


def _packages(environment: Path) -> Path:
    return environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _needed(requires: Iterable[str]) -> list[metadata.Distribution]:
    """Return the distributions that these requirements name and their own requirements: kvc-trt[serve]."""
    waiting = [(Requirement(text), frozenset(["", "serve"])) for text in requires]
    found: dict[str, metadata.Distribution] = {}
    seen = set()
    while waiting:
        one, extras = waiting.pop()
        if one.marker is not None and not any(one.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        key = canonicalize_name(one.name), frozenset(one.extras)
        if key not in seen:
            seen.add(key)
            found[key[0]] = metadata.distribution(one.name)
            waiting += [(Requirement(text), frozenset(["", *one.extras])) for text in found[key[0]].requires or ()]
    return list(found.values())


@pytest.fixture(scope="module")
def alone(environment: Path) -> dict[str, Any]:
    """Return arguments for subprocess.run that leave kvc-trt no programs but those of its environment."""
    home = environment.parent
    variables = {"PATH": str(environment / "bin"), "HOME": str(home), "KVC_TRT_CACHE": str(home / "cache")}
    return {"cwd": home, "env": variables, "text": True}


@pytest.fixture(scope="module")
def command(environment: Path, alone: dict[str, Any]) -> Callable[..., tuple[int, str, str]]:
    """kvc-trt as it is installed: (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        line = [str(environment / "bin" / "kvc-trt"), *arguments]
        done = subprocess.run(line, **alone, capture_output=True, timeout=300)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture(scope="module")
def demo(command: Callable[..., tuple[int, str, str]]) -> str:
    code, _, said = command("build", *DEMO, "--no-verify", "-o", "demo")
    assert code == 0, said
    return "demo"


def test_the_wheel_is_one_for_other_distributions_of_linux(wheel: Path) -> None:
    """Its tag says what it needs: no library but those that they all have, and a glibc no newer than this one."""
    assert re.fullmatch(rf"kvc_trt-{re.escape(__version__)}-py3-none-linux_\w+\.whl", wheel.name)
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", str(wheel)], capture_output=True, text=True, check=True
    ).stdout
    tag = re.search(r'platform tag:\s+"manylinux_(\d+)_(\d+)_\w+"', " ".join(shown.split()))
    assert tag is not None, shown
    needed, here = tuple(map(int, tag.groups())), tuple(map(int, platform.libc_ver()[1].split(".")[:2]))
    print(f"needs glibc {needed[0]}.{needed[1]}, found {here[0]}.{here[1]}; {wheel.stat().st_size} bytes")
    assert needed <= here


def test_native_operators_run_where_there_is_no_compiler(command, environment: Path) -> None:
    code, printed, _ = command("doctor")
    assert code == 0
    library = _packages(environment) / "kvc_trt" / "lib" / "libkvc_cpu.so"
    assert f"found  native operators {library}: " in printed
    assert "needs  Python package torch (not installed)" in printed


def test_a_build_says_what_verification_lacks_before_it_builds(command, alone) -> None:
    code, _, said = command("build", *DEMO, "-o", "unverified")
    assert code == 3
    assert "error: verification compares with PyTorch, which is not installed" in said
    assert "hint: pip install 'kvc-trt[verify]', or build with --no-verify" in said
    assert not (alone["cwd"] / "unverified").exists()


def test_the_installed_wheel_answers_the_demo(command, demo: str) -> None:
    needle = build.ROOT / "docs" / "demo" / "needle.txt"
    code, printed, said = command("run", demo, "--prompt-file", str(needle))
    assert (code, printed.strip()) == (0, ANSWER)
    assert "native operators (" in said


def test_tasks_are_asked_without_pytorch(command, demo: str) -> None:
    asked = ("--level", "tasks", "--tasks", "associative-recall", "--samples", "2", "--lengths", "256")
    code, printed, said = command("verify", demo, *asked)
    assert code == 0, said
    assert "accuracy of retrieval-tiny" in printed


def test_the_installed_wheel_serves_the_demo(environment: Path, alone: dict[str, Any], demo: str) -> None:
    line = [str(environment / "bin" / "kvc-trt"), "serve", demo, "--port", "0"]
    server = subprocess.Popen(line, **alone, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    limit = Timer(120, server.kill)
    limit.start()
    try:
        assert server.stdout is not None
        said: list[str] = []
        while (ready := re.search(r"ready at (http://127\.0\.0\.1:\d+/v1)", said[-1] if said else "")) is None:
            said.append(server.stdout.readline())
            assert said[-1], said
        prompt = "<record> lamp scarlet tiger lagos eight <query> lamp"
        body = json.dumps({"model": "demo", "prompt": prompt, "max_tokens": 4}).encode()
        request = Request(f"{ready[1]}/completions", body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["text"].strip() == "scarlet tiger lagos eight"
    finally:
        server.terminate()
        server.wait(timeout=60)
        limit.cancel()
