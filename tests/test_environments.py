"""environments/: what make installs is what pyproject.toml and the Makefile ask for, file by file by its hash."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from email.message import Message
from itertools import product
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from environments import install, licences
from tests.test_project import PYPROJECT, ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
ENVIRONMENTS = ("development", "dynamo", "triton", "aiperf", "clients", "release")
FILES = (*ENVIRONMENTS, "alone")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
UNSUPPORTED = [("aiperf", "3.10")]
"""Pairs of environment and Python that a package's own releases leave out."""


def made(name: str) -> list[str]:
    """Return the words of a variable of the Makefile."""
    (value,) = re.findall(rf"^{name} := (.*)$", MAKEFILE, flags=re.MULTILINE)
    return value.replace("'", "").split()


def asked(environment: str) -> list[str]:
    """Return the requirements that an environment states itself; these packages bring their own."""
    project, build = PYPROJECT["project"], PYPROJECT["build-system"]["requires"]
    if environment == "aiperf":
        return made("FOR_AIPERF")
    if environment == "clients":
        return made("FOR_CLIENTS")
    if environment == "release":
        return [*made("FOR_RELEASE"), *build]
    extras = {"development": made("EXTRAS"), "dynamo": ["dynamo"], "triton": []}[environment]
    chosen = [text for extra in extras for text in project["optional-dependencies"][extra]]
    more = {"development": [], "dynamo": made("FOR_DYNAMO"), "triton": made("FOR_TRITON")}[environment]
    return [*project["dependencies"], *build, *chosen, *more]


def holding(texts: list[str], python: str) -> Iterator[Requirement]:
    """Yield the requirements that hold for a Python "3.x" on Linux."""
    there = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    for one in map(Requirement, texts):
        if one.marker is None or one.marker.evaluate(there):
            yield one


def locked(environment: str, python: str) -> dict[str, str]:
    """Package -> version in the file of an environment."""
    lines = [str(one.requirement) for one in install.read(ROOT / "environments" / f"{environment}.txt")]
    found: dict[str, str] = {}
    for one in holding(lines, python):
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


@pytest.mark.parametrize("name", [*FILES, "other-builds"])
def test_every_locked_version_has_hashes(name: str) -> None:
    versions = install.read(ROOT / "environments" / f"{name}.txt")
    assert versions
    for one in versions:
        assert one.hashes, one.requirement
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", text) for text in one.hashes), one.requirement


def test_another_build_is_one_of_a_locked_version() -> None:
    versions = install.read(ROOT / "environments" / "development.txt")
    for other in install.read(install.OTHER_BUILDS):
        assert any(install.stands_for(other, one) for one in versions), other.requirement


def test_make_installs_by_hash_alone() -> None:
    """The newest versions and the engines of others, which CI does not make, are all that has no lock."""
    by_pip = re.findall(r"^.*pip install.*$", MAKEFILE, flags=re.MULTILINE)
    assert by_pip
    assert [line for line in by_pip if "$(LATEST)" not in line and "$(PEERS)" not in line] == []
    by_hash = set(re.findall(r"\$\(INSTALL\) (\w+)", MAKEFILE))
    assert by_hash == {path.stem for path in (ROOT / "environments").glob("*.txt")} - {"other-builds"} == set(FILES)


def test_packages_installed_alone_are_locked() -> None:
    versions = {f"{one.requirement}" for one in install.read(ROOT / "environments" / "alone.txt")}
    assert versions == set(made("ALONE"))
    used = set(re.findall(r"\$\(call alone,(\S+)\)", MAKEFILE))
    assert {one.partition("==")[0] for one in versions} == {*used, "pip"}


@pytest.mark.parametrize(("version", "renewed"), [("23.2.1", ["pip"]), ("99.0", [])])
def test_an_older_pip_is_replaced_by_the_locked_one(version: str, renewed: list[str], monkeypatch) -> None:
    monkeypatch.setattr(install.metadata, "version", lambda _: version)
    assert [one.requirement.name for one in install.newer_pip()] == renewed


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that pip finds without an index; what pip installs goes into the folder `target` beside it."""
    path = tmp_path / "lonely-1.0+local-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("lonely.py", "")
        wheel.writestr(
            "lonely-1.0+local.dist-info/METADATA", "Metadata-Version: 2.1\nName: lonely\nVersion: 1.0+local\n"
        )
        wheel.writestr(
            "lonely-1.0+local.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("lonely-1.0+local.dist-info/RECORD", "")
    settings = {
        "NO_INDEX": "1",
        "FIND_LINKS": str(tmp_path),
        "TARGET": str(tmp_path / "target"),
        "CONFIG_FILE": "/dev/null",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return path


def version(text: str, digest: str) -> install.Locked:
    return install.Locked(install.Requirement(text), (f"--hash=sha256:{digest}",))


def test_a_file_with_another_hash_is_not_installed(package: Path, capfd: pytest.CaptureFixture[str]) -> None:
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    wrong = digest[:-1] + ("0" if digest[-1] != "0" else "1")
    for locked in (version("lonely==1.0", wrong), version("lonely==1.0+local", wrong)):
        with pytest.raises(subprocess.CalledProcessError):
            install.install([locked], [])
        assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err
    with pytest.raises(subprocess.CalledProcessError):  # another build is no way round
        install.install([version("lonely==1.0", digest)], [version("lonely==1.0+local", wrong)])
    assert not (package.parent / "target").exists()
    install.install([version("lonely==1.0", digest)], [])
    assert (package.parent / "target" / "lonely.py").exists()


def test_another_build_is_installed_where_there_is_one(package: Path) -> None:
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    install.install([version("lonely==1.0", "0" * 64)], [version("lonely==1.0+local", digest)])
    assert (package.parent / "target" / "lonely.py").exists()


def test_an_absent_build_leaves_the_locked_version(package: Path) -> None:
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    install.install([version("lonely==1.0", digest)], [version("lonely==1.0+elsewhere", "0" * 64)])
    assert (package.parent / "target" / "lonely.py").exists()


def test_one_process_at_a_time_installs_into_an_environment(tmp_path: Path) -> None:
    """`make` installs several extras of one environment side by side."""
    entered = threading.Event()

    def enter() -> None:
        with install.alone_in(tmp_path):
            entered.set()

    other = threading.Thread(target=enter)
    with install.alone_in(tmp_path):
        other.start()
        assert not entered.wait(0.2)
    assert entered.wait(60)
    other.join()


@pytest.mark.parametrize("words", [["--no-dependencies", "lonely==1.0"], ["lonely==1.0", "--no-dependencies"]])
def test_requirements_stand_before_or_behind_options(words: list[str], monkeypatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(install, "newer_pip", list)
    monkeypatch.setattr(install, "missing", lambda of, *_, **__: asked.append([str(one) for one in of]) or [])
    assert install.main(["alone", *words]) == 0
    assert asked == [["lonely==1.0"]]


def test_a_requirement_without_a_version_is_reported_in_one_line(capsys, monkeypatch) -> None:
    monkeypatch.setattr(install, "newer_pip", list)
    assert install.main(["alone", "--no-dependencies", "lonely==1.0"]) == 2
    assert capsys.readouterr().err == "error: environments/alone.txt has no version of lonely==1.0; run make lock\n"


def test_missing_packages_follow_from_the_installed_metadata() -> None:
    asked = install.requirements(["pytest", "lonely; python_version < '3'"])
    there = {name: version(f"{name}=={install.metadata.version(name)}", "0" * 64) for name in ("pytest", "packaging")}
    locked = there | {name: version(f"{name}==0.0.1", "0" * 64) for name in ("pluggy", "iniconfig", "pygments")}
    absent = [one.requirement.name for one in install.missing(asked, locked, dependencies=True)]
    assert absent == ["iniconfig", "pluggy", "pygments"]
    assert install.missing(asked, locked, dependencies=False) == []
    with pytest.raises(install.NotLocked, match="pytest"):
        install.missing(asked, {}, dependencies=True)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"License-Expression": "MIT AND (Apache-2.0 OR GPL-3.0-only)"}, ["MIT", "Apache-2.0", "GPL-3.0-only"]),
        ({"License": "BSD 3-Clause", "Classifier": "License :: OSI Approved :: MIT License"}, ["MIT"]),
        ({"License": "Apache 2.0"}, ["Apache-2.0"]),
        ({"License": "GPLv3"}, ["GPLv3"]),
        ({"License": "Proprietary", "Author": "NVIDIA Corporation"}, ["NVIDIA"]),
        ({"License": "Proprietary", "Author": "Someone"}, ["Proprietary, of Someone"]),
        ({"License": "The MIT License (MIT)", "Classifier": "License :: DFSG approved"}, ["MIT"]),
        ({"Classifier": "License :: OSI Approved"}, ["none named"]),
        ({}, ["none named"]),
    ],
)
def test_a_licence_is_what_the_metadata_names(fields: dict[str, str], expected: list[str]) -> None:
    metadata = Message()
    for name, value in {"Name": "lonely", **fields}.items():
        metadata[name] = value
    assert [licences.known(name) for name in licences.stated(metadata)] == expected


@pytest.mark.parametrize(("licence", "code"), [("MIT", 0), ("GPL-3.0-only", 1), ("MIT OR GPL-3.0-only", 1)])
def test_a_licence_that_is_not_allowed_fails(
    licence: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "lonely-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: lonely\nVersion: 1.0\nLicense-Expression: {licence}\n"
    )
    monkeypatch.setattr(licences.metadata, "distributions", lambda: [install.metadata.Distribution.at(folder)])
    assert licences.main() == code
    assert ("not allowed: GPL-3.0-only" in capsys.readouterr().out) == bool(code)


def test_licences_of_this_environment_are_allowed() -> None:
    """In a process of its own, as `make licences`: other tests add to the path on which distributions are found."""
    command = [sys.executable, str(Path(licences.__file__))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
