"""Installs a locked environment into the Python that runs this file: what a lock names, with the hashes it names.

    python environments/install.py development --project --extra test
    python environments/install.py aiperf aiperf==0.13.0
    python environments/install.py alone --no-dependencies kvpress==0.5.5

A lock has the versions for every Python and platform, more than one machine needs. This installs the requirements that
are asked for, then what the metadata of those asks for, until nothing is missing. pip gets every file with its hashes
and never looks for versions; archives of sources, which need packages of their own to be built, are refused.

It runs before anything is installed: it uses the standard library and what pip brings.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name
from pip._vendor.packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

FOLDER = Path(__file__).resolve().parent
PROJECT = FOLDER.parent
OTHER_BUILDS = FOLDER / "other-builds.txt"
"""Builds of locked versions that the package index does not have; taken where pip is told of a place that has them."""
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps")
ABSENT = "No matching distribution found"
"""What pip says of a version that none of its sources has."""


class Locked(NamedTuple):
    """A version of a lock, with the hashes of its files."""

    requirement: Requirement
    hashes: tuple[str, ...]

    def line(self) -> str:
        """Return the line of pip's requirements file."""
        return " ".join([f"{self.requirement.name}{self.requirement.specifier}", *self.hashes])


class NotLocked(Exception):
    """A requirement has no version in the lock."""


def read(path: Path) -> list[Locked]:
    """Return every version of a lock, for all Pythons and platforms."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = (line.split("#")[0].split(" --") for line in text.splitlines())
    return [
        Locked(Requirement(words[0]), tuple(f"--{word.strip()}" for word in words[1:]))
        for words in lines
        if words[0].strip()
    ]


def for_this_python(locked: Iterable[Locked]) -> dict[str, Locked]:
    """Return the versions that hold for this Python and platform, by name."""
    there = (one for one in locked if one.requirement.marker is None or one.requirement.marker.evaluate())
    return {canonicalize_name(one.requirement.name): one for one in there}


def missing(asked: Iterable[Requirement], locked: Mapping[str, Locked], *, dependencies: bool) -> list[Locked]:
    """Return the versions that `asked`, and the metadata of what is installed, ask for and that are not there."""
    open_ones, seen, found = list(asked), set(), {}
    while open_ones:
        one = open_ones.pop()
        name = canonicalize_name(one.name)
        if (name, *sorted(one.extras)) in seen:
            continue
        seen.add((name, *sorted(one.extras)))
        if name not in locked:
            raise NotLocked(str(one))
        there = installed(locked[name].requirement)
        if there is None:
            found[name] = locked[name]
        elif dependencies:
            open_ones += requirements(there.requires or [], one.extras)
    return [found[name] for name in sorted(found)]


def installed(requirement: Requirement) -> metadata.Distribution | None:
    """Return the distribution that meets a requirement, None if there is none."""
    try:
        there = metadata.distribution(requirement.name)
    except metadata.PackageNotFoundError:
        return None
    return there if requirement.specifier.contains(there.version, prereleases=True) else None


def requirements(texts: Iterable[str], extras: Iterable[str] = ()) -> list[Requirement]:
    """Return the requirements among `texts` that hold here, with any of `extras` or without."""
    parsed = map(Requirement, texts)
    cases = ("", *extras)
    return [one for one in parsed if one.marker is None or any(one.marker.evaluate({"extra": case}) for case in cases)]


def of_project(extras: Iterable[str], *, project: bool) -> list[str]:
    """Return what pyproject.toml asks for in `extras`, and for the project itself and its build."""
    stated: dict[str, Any] = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    own = [*stated["build-system"]["requires"], *stated["project"]["dependencies"]] if project else []
    return [*own, *(text for extra in extras for text in stated["project"]["optional-dependencies"][extra])]


def split_other_builds(wanted: Iterable[Locked], others: Iterable[Locked]) -> tuple[list[Locked], list[Locked]]:
    """Return the other builds of what is wanted, and the locked versions that they stand for."""
    found = [(other, one) for other in others for one in wanted if stands_for(other, one)]
    return [other for other, _ in found], [one for _, one in found]


def stands_for(other: Locked, one: Locked) -> bool:
    """Return whether `other` is a build of the version `one`: the same but for the part behind a plus."""
    (version,) = other.requirement.specifier
    same = canonicalize_name(other.requirement.name) == canonicalize_name(one.requirement.name)
    return same and one.requirement.specifier.contains(version.version, prereleases=True)


def newer_pip() -> list[Locked]:
    """Return the locked pip if this one is older.

    The one that Python 3.11 brings, pip 23, takes most of its time to weigh every file that an index has of a project.
    """
    locked = for_this_python(read(FOLDER / "alone.txt"))["pip"]
    (version,) = locked.requirement.specifier
    return [locked] if Version(metadata.version("pip")) < Version(version.version) else []


def install(wanted: Iterable[Locked], others: Iterable[Locked]) -> None:
    """Install what is wanted; of a version with another build that build, where there is one."""
    wanted = list(wanted)
    builds, replaced = split_other_builds(wanted, others)
    if builds and not pip_install(builds, may_be_absent=True):
        replaced = []
    pip_install([one for one in wanted if one not in replaced])


def pip_install(locked: Iterable[Locked], *, may_be_absent: bool = False) -> bool:
    """Let pip install exactly these files; return whether it did.

    It raises CalledProcessError, after pip's error, where a hash differs or a version is absent that may not be.
    """
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "requirements.txt"
        listed.write_text("".join(f"{one.line()}\n" for one in locked), encoding="utf-8")
        # Python compiles a module when it is first imported; pip would compile all, of which few ever are.
        options = ("--no-compile", "--require-hashes", "--only-binary", ":all:", "--requirement", str(listed))
        done = subprocess.run([*PIP, *options], stderr=subprocess.PIPE, text=True)
    importlib.invalidate_caches()
    if done.returncode and may_be_absent and ABSENT in done.stderr:
        return False
    sys.stderr.write(done.stderr)
    done.check_returncode()
    return True


@contextlib.contextmanager
def alone_in(environment: Path) -> Iterator[None]:
    """Wait until no other process installs into an environment, and keep others waiting until the end of the block."""
    with (environment / ".installing").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Install what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(description="install a locked environment into this Python")
    parser.add_argument("lock", help="the name of a file in environments/, without .txt")
    parser.add_argument("requirements", nargs="*", help="such as 'numpy<2'")
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml; again for more")
    parser.add_argument("--project", action="store_true", help="kvc-trt itself, editable, with what it needs")
    parser.add_argument("--no-dependencies", action="store_true", help="nothing but what is named")
    options = parser.parse_intermixed_args(arguments)
    asked = requirements([*of_project(options.extra, project=options.project), *options.requirements])
    locked = for_this_python(read(FOLDER / f"{options.lock}.txt"))
    try:
        with alone_in(Path(sys.prefix)):
            if pip := newer_pip():
                pip_install(pip, may_be_absent=True)
            while left := missing(asked, locked, dependencies=not options.no_dependencies):
                install(left, read(OTHER_BUILDS))
            if options.project:
                subprocess.run([*PIP, "--no-build-isolation", "--editable", str(PROJECT)], check=True)
    except NotLocked as error:
        print(f"error: environments/{options.lock}.txt has no version of {error}; run make lock", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
