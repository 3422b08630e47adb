"""Unpack the wheels that fit this Python, for a machine that has no environment and no internet.

    python3 benchmarks/bundle/unpack.py WHEELS FOLDER

Prints the folder to put on PYTHONPATH, below FOLDER; wheels that are unpacked there already are used as they are. A
package with no wheel for this Python is the machine's own; if that is missing too, the error names it and the exit
status is 3. Needs the standard library alone: it runs before anything else can be imported.
"""

from __future__ import annotations

import platform
import shutil
import sys
import zipfile
from importlib import metadata
from pathlib import Path

CANNOT = 3
OLDEST_GLIBC = (2, 34)
"""The glibc that the compiled kernels need: Ubuntu 22.04, RHEL 9 or later."""


def too_old() -> str | None:
    """Return the error of a machine whose C library is older than that of the kernels; None where it is not."""
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(int(part) for part in version.split(".")[:2]) >= OLDEST_GLIBC:
        return None
    oldest = ".".join(map(str, OLDEST_GLIBC))
    return f"the kernels need glibc {oldest} or newer (Ubuntu 22.04, RHEL 9), found {version}; take a newer machine"


def fitting(wheels: Path) -> tuple[dict[str, Path], list[str]]:
    """Package -> its wheel that fits this Python best, and the packages of which none fits."""
    # A wheel of pure Python is a zip file that can be imported from.
    sys.path.insert(0, str(next(wheels.glob("packaging-*.whl"))))
    from packaging.tags import sys_tags
    from packaging.utils import parse_wheel_filename

    ranks = {tag: rank for rank, tag in enumerate(sys_tags())}
    best: dict[str, tuple[int, Path]] = {}
    names: set[str] = set()
    for path in sorted(wheels.glob("*.whl")):
        name, _, _, tags = parse_wheel_filename(path.name)
        names.add(name)
        found = [ranks[tag] for tag in tags if tag in ranks]
        if found and (name not in best or min(found) < best[name][0]):
            best[name] = min(found), path
    return {name: path for name, (_, path) in best.items()}, sorted(names - best.keys())


def is_installed(name: str) -> bool:
    """Return True if this Python has the package itself."""
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def unpack(wheels: Path, folder: Path) -> Path:
    """Unpack the wheels that fit into a folder of this Python's own; it exists whole or not at all. Raises
    LookupError."""
    target = folder / (sys.implementation.cache_tag or sys.implementation.name)
    if target.is_dir():
        return target
    found, without = fitting(wheels)
    lacking = [name for name in without if not is_installed(name)]
    if lacking:
        version = ".".join(map(str, sys.version_info[:2]))
        raise LookupError(f"no wheel for Python {version} in {wheels}, and not installed: {', '.join(lacking)}")
    partial = folder / f".{target.name}"
    shutil.rmtree(partial, ignore_errors=True)
    for path in found.values():
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(partial)
    partial.rename(target)
    return target


def main(arguments: list[str]) -> int:
    wheels, folder = map(Path, arguments)
    if (problem := too_old()) is not None:
        print(f"error: {problem}", file=sys.stderr)
        return CANNOT
    try:
        print(unpack(wheels, folder))
    except LookupError as error:
        print(f"error: {error}; set PY=python3.x to a Python that the bundle was made for", file=sys.stderr)
        return CANNOT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
