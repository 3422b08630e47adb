"""environments/: the versions that make installs are those that pyproject.toml and the Makefile ask for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.test_project import PYPROJECT, ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
ENVIRONMENTS = ("development", "dynamo", "triton", "aiperf")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
UNSUPPORTED = [("aiperf", "3.10")]
"""Pairs of environment and Python that a package's own releases leave out."""


def made(name: str) -> list[str]:
    """The words of a variable of the Makefile."""
    (value,) = re.findall(rf"^{name} := (.*)$", MAKEFILE, flags=re.MULTILINE)
    return value.replace("'", "").split()


def asked(environment: str) -> list[str]:
    """The requirements that an environment states itself; these packages bring their own."""
    project = PYPROJECT["project"]
    if environment == "aiperf":
        return made("FOR_AIPERF")
    extras = {"development": made("EXTRAS"), "dynamo": ["dynamo"], "triton": []}[environment]
    chosen = [text for extra in extras for text in project["optional-dependencies"][extra]]
    return [*project["dependencies"], *chosen, *(made("FOR_TRITON") if environment == "triton" else ())]


def holding(texts: list[str], python: str) -> Iterator[Requirement]:
    """The requirements that hold for a Python "3.x" on Linux."""
    there = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    for one in map(Requirement, texts):
        if one.marker is None or one.marker.evaluate(there):
            yield one


def locked(environment: str, python: str) -> dict[str, str]:
    """Package -> version in the file of an environment."""
    lines = (ROOT / "environments" / f"{environment}.txt").read_text(encoding="utf-8").splitlines()
    found: dict[str, str] = {}
    for one in holding([line for line in lines if not line.startswith("#")], python):
        (version,) = one.specifier
        assert version.operator == "=="
        assert found.setdefault(canonicalize_name(one.name), version.version) == version.version, one.name
    return found


@pytest.mark.parametrize(
    ("environment", "python"), [both for both in product(ENVIRONMENTS, PYTHONS) if both not in UNSUPPORTED]
)
def test_every_requirement_has_one_version_that_it_admits(environment: str, python: str) -> None:
    versions = locked(environment, python)
    for one in holding(asked(environment), python):
        version = versions.get(canonicalize_name(one.name))
        assert version is not None, f"{one} has no version in environments/{environment}.txt; run make lock"
        assert one.specifier.contains(version, prereleases=True), f"{one}, found {version}; run make lock"


def test_make_installs_nothing_that_has_no_version() -> None:
    """Each installation is constrained, or its packages are named with their versions and ask for nothing."""
    installations = re.findall(r"^.*pip install(?:.*\\\n)*.*$", MAKEFILE, flags=re.MULTILINE)
    ours = [one for one in installations if "$(PEERS)" not in one]
    assert len(ours) >= 8
    for one in ours:
        free = re.search(r"--no-deps \S+==\S+$", one)
        assert free or re.search(r"--constraint environments/\w+\.txt\s", one), one


def test_every_file_is_that_of_an_environment() -> None:
    files = {path.stem for path in (ROOT / "environments").iterdir()}
    assert files == set(ENVIRONMENTS)
    assert {f"environments/{name}.txt" for name in files} == set(re.findall(r"--constraint (\S+)", MAKEFILE))
