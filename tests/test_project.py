"""Statements of the project's own files about versions, markers and hooks are true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvc_trt import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_changelog_has_the_packages_version_and_dates_in_order():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d{2}-\d{2}))?$", text, re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    versions, dates = zip(*headings[1:], strict=True)
    assert versions[0] == __version__
    assert all(dates)
    assert list(dates) == sorted(dates, reverse=True)


def test_a_change_is_one_line_of_the_changelog():
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n## ")[2].splitlines()
    assert [line for line in changes if line.startswith(" ") or len(line) > 120] == []


@pytest.mark.parametrize(("block", "page"), [(0, "transcript.md"), (1, "chat.md")])
def test_demo_output_in_the_readme_is_in_its_transcript_in_that_order(block: int, page: str) -> None:
    """Fifteen lines at most; tables are drawn narrower, and `...` stands for omitted parts."""
    shown = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[block]
    whole = re.sub(r"[^\S\n]+", " ", (ROOT / "docs" / "demo" / page).read_text(encoding="utf-8"))
    lines = [" ".join(line.split()).removeprefix("ops ") for line in shown.splitlines()]
    assert len(lines) <= 15
    place = 0
    for line in lines:
        if line != "...":
            place = whole.index(line, place) + len(line)


@pytest.mark.parametrize(("page", "most"), [("README.md", 110), ("docs/results/accuracy-smollm2.md", 120)])
def test_pages_that_are_read_to_their_end_are_short(page: str, most: int) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= most


def test_lines_of_the_readme_are_wrapped_alike():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith(("|", "- "))] == []


def test_every_marker_is_explained_to_contributors():
    markers = {
        marker.partition(":")[0].partition("(")[0] for marker in PYPROJECT["tool"]["pytest"]["ini_options"]["markers"]
    }
    table = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert table == markers


def test_hooks_of_a_commit_run_the_pinned_tools():
    """Each from the environment that pyproject pins: no version is written a second time."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [repository["repo"] for repository in hooks] == ["local"]
    tools = {hook["entry"].split()[0] for hook in hooks[0]["hooks"]}
    assert tools == {f".venv/bin/{name}" for name in ("ruff", "clang-format", "mypy")}
    pinned = {requirement.partition("==")[0] for requirement in PYPROJECT["project"]["optional-dependencies"]["test"]}
    assert {"ruff", "clang-format", "mypy"} <= pinned


def test_at_most_one_of_the_targets_that_run_side_by_side_runs_cmake():
    """Two would write the same build folder at once, and the slower one fails now and then."""
    lines = re.findall(r"^\t\$\(SIDE_BY_SIDE\) (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert lines
    for line in lines:
        targets = re.findall(r"[a-z][a-z-]*", re.sub(r"\$\(if [^)]*\),", "", line))
        assert sum(map(runs_cmake, targets)) <= 1, line


def runs_cmake(target: str) -> bool:
    """True if a target of the Makefile writes the build folder, where all that is made once is there."""
    there = ["-o", ".venv/.installed", "-o", "build/.native", "-o", "build/libkvc_kernels.so"]
    recipe = subprocess.run(["make", "-n", *there, target], cwd=ROOT, capture_output=True, text=True, check=True)
    return "cmake -S" in recipe.stdout
