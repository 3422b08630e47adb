"""The stamp of the kernels' tests: `make test-all` skips them while no file that they read has changed.

The tests write down which modules of this repository they have loaded (`record`). Once all have passed, the stamp keeps
a SHA-256 of each of these files, of everything in `FOLDERS` and `FILES`, and of the versions of compilers and packages.

    python -m tests.kernel_stamp BUILD --check    # exit code 0: the stamp in BUILD holds; 1: it does not, and why
    python -m tests.kernel_stamp BUILD --write    # after the tests have passed
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VARIABLE = "KVC_TRT_LOADED_MODULES"
"""The environment variable that names the folder into which test processes write their loaded modules."""
FOLDERS = ("plugins_cuda", "tests/plugins_cuda")
"""Folders that the tests compile, copy and read whole."""
FILES = ("CMakeLists.txt", "Makefile", "pyproject.toml", "environments/development.txt", "docs/kernels-resources.md")
COMPILERS = ("c++", "nvcc", "cuobjdump", "nvdisasm")


def record() -> None:
    """Write down the modules of this repository that this process has loaded, where the environment asks for it."""
    if folder := os.environ.get(VARIABLE):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{os.getpid()}.txt").write_text("\n".join(loaded_files()))


def loaded_files() -> list[str]:
    """Files of the modules in this process, relative to the repository, without those of its environments."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    paths = {Path(file).resolve() for file in files if file is not None}
    inside = (path.relative_to(ROOT) for path in paths if path.is_relative_to(ROOT))
    return sorted(str(path) for path in inside if path.parts[0] not in (".venv", "build"))


def digests(modules: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    """SHA-256 of every input, by its path; "missing" for an absent file, "versions" for compilers and packages."""
    whole = (path for folder in FOLDERS for path in (root / folder).rglob("*") if "__pycache__" not in path.parts)
    names = {*modules, *FILES, *(str(path.relative_to(root)) for path in whole if path.is_file())}
    found = {name: _digest(root / name) for name in sorted(names)}
    return found | {"versions": hashlib.sha256("\n".join(_versions()).encode()).hexdigest()}


def first_difference(kept: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """The first input that was added, removed or changed since the stamp was written; None without a difference."""
    return next((name for name in sorted({*kept, *now}) if kept.get(name) != now.get(name)), None)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"


def _versions() -> list[str]:
    packages = sorted(f"{one.name} {one.version}" for one in metadata.distributions() if one.name != "kvc-trt")
    compilers = [_version_of(name) for name in COMPILERS]
    return [sys.version, *packages, *compilers]


def _version_of(compiler: str) -> str:
    if (path := shutil.which(compiler)) is None:
        return f"no {compiler}"
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, help="the build folder")
    parser.add_argument("--check", action="store_true", help="whether the stamp holds")
    parser.add_argument("--write", action="store_true", help="write the stamp of the modules that were recorded")
    options = parser.parse_args(arguments)
    stamp, recorded = options.build / "kernels-passed.json", options.build / "kernels-loaded"
    if options.write:
        modules = {name for file in recorded.glob("*.txt") for name in file.read_text().splitlines()}
        if not modules:
            parser.error(f"no modules were recorded in {recorded}; run the tests with {VARIABLE}={recorded}")
        stamp.write_text(json.dumps({"modules": sorted(modules), "digests": digests(modules)}, indent=1))
        return 0
    if not stamp.is_file():
        print(f"{stamp}: there is none, the kernels are tested")
        return 1
    kept = json.loads(stamp.read_text())
    if changed := first_difference(kept["digests"], digests(kept["modules"])):
        print(f"{stamp}: {changed} has changed since, the kernels are tested")
        return 1
    print(f"{stamp} holds: the tests of kernels have passed with these very inputs, and are passed over")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
