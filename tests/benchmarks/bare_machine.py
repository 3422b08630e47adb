"""A machine with Python, PyTorch, NumPy and a few commands, and nothing else: no network, no git, no compiler, no GPU.

A root folder of its own, in mount and network namespaces of its own (`unshare`, `chroot`), which need root or a kernel
that lets users have them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

COMMANDS = ("sh", "env", "cat", "cp", "date", "dirname", "find", "mkdir", "nproc", "timeout")
BROUGHT = ("torch", "numpy")
UNSHARE = ("unshare", "--mount", "--net", "--map-root-user")
DAY = Path("/day")
"""The folder inside in which commands run."""


def missing() -> str | None:
    """Return the reason why there can be no such machine here; None if there can."""
    if not all(shutil.which(command) for command in ("unshare", "chroot", "mount", *COMMANDS)):
        return "unshare, chroot, mount or one of the commands inside is not installed"
    tried = subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
    return None if tried.returncode == 0 else f"no namespaces for mounts and network: {tried.stderr.decode().strip()}"


class BareMachine:
    """The root folder, made below `folder`; `run` starts a command in it."""

    def __init__(self, folder: Path) -> None:
        self.root, packages = folder / "root", folder / "packages"
        base = Path(sys.base_prefix)
        for name in ("bin", "usr/bin", "tmp", "out", DAY.name):
            (self.root / name).mkdir(parents=True)
        for command in COMMANDS:
            shutil.copy(str(shutil.which(command)), self.root / "usr" / "bin" / command)
        (self.root / "bin" / "sh").symlink_to("/usr/bin/sh")
        python = base / "bin" / f"python{sysconfig.get_python_version()}"
        inside = self._inside(python)
        inside.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(python, inside)
        (self.root / "usr" / "bin" / "python3").symlink_to(python)

        libraries = [Path(place) for place in ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/proc", "/dev")]
        libraries += [] if base == Path("/usr") else [base / "lib"]
        self._mounts = [(place, place) for place in libraries if place.is_dir()]
        for place, _ in self._mounts:
            self._inside(place).mkdir(parents=True, exist_ok=True)
        # The Python inside sees no packages but those that are put over its own.
        packages.mkdir()
        ask = [str(python), "-I", "-c", "import site; print(*site.getsitepackages())"]
        places = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()
        site, *others = [Path(place) for place in places if Path(place).is_dir()]
        for place in (site, *others):  # those of a system's Python are in no folder that is mounted
            self._inside(place).mkdir(parents=True, exist_ok=True)
        (folder / "empty").mkdir()
        self._mounts += [(packages, site), *((folder / "empty", other) for other in others)]
        for source in brought():
            if source.is_dir():
                (packages / source.name).mkdir()
                self._mounts.append((source, site / source.name))
            else:
                shutil.copy(source, packages)

    def _inside(self, path: Path) -> Path:
        return self.root / path.relative_to("/")

    def run(self, command: str, *, seconds: int = 280) -> subprocess.CompletedProcess[str]:
        """Run a line of shell in the folder DAY, with an environment of nothing but its PATH."""
        script = "\n".join((
            "set -e",
            *(f"mount --rbind {source} {self._inside(place)}" for source, place in self._mounts),
            f"exec chroot {self.root} /usr/bin/env -i PATH=/usr/bin sh -c 'cd {DAY}; {command}'",
        ))  # fmt: skip
        return subprocess.run(
            [*UNSHARE, "sh", "-c", script], capture_output=True, text=True, timeout=seconds, check=False, cwd="/"
        )


def brought() -> list[Path]:
    """Return the folders and files of PyTorch, NumPy and all that these two need, in this environment."""
    found: set[Path] = set()
    names: set[str] = set()
    waiting = [Requirement(name) for name in BROUGHT]
    while waiting:
        requirement = waiting.pop()
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if requirement.name in names or not applies:
            continue
        names.add(requirement.name)
        distribution = metadata.distribution(requirement.name)
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        found |= {Path(str(distribution.locate_file(top))) for top in tops}
        waiting += [Requirement(text) for text in distribution.requires or ()]
    return sorted(found)
