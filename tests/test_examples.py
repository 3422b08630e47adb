"""The examples run as their pages say, and their scripts and pages stay short."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.readable_model import text, with_template

pytestmark = pytest.mark.as_users
ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
FOLDERS = sorted(path for path in EXAMPLES.iterdir() if path.is_dir() and path.name[:2].isdigit())
ANSWER = "scarlet tiger lagos eight"


def printed(script: str, *arguments: str, cwd: Path, **environment: str) -> str:
    """Return the output of an example, started as its page says, in an empty directory."""
    runs = "sh" if script.endswith(".sh") else sys.executable
    done = subprocess.run(
        [runs, str(EXAMPLES / script), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_engine_is_built_and_asked(tmp_path: Path) -> None:
    answer, held, batch, stream = printed("01_build_and_ask/ask.py", cwd=tmp_path).splitlines()
    assert answer == "scarlet bear hanoi fourteen (stop)"
    assert held == "1024 prompt tokens, 248 entries in each cache"
    assert "(248: 244 of the prompt and 4 of the answer)" in (EXAMPLES / "01_build_and_ask/README.md").read_text()
    assert '"logical": 1028, "physical": [248, 248, 248]' in (ROOT / "docs/guide.md").read_text()
    assert batch == "['scarlet tiger', 'scarlet bear']"
    assert stream == "scarlet| tiger| lagos| eight"


@pytest.mark.slow
def test_an_engine_is_verified(tmp_path: Path) -> None:
    table = printed("02_verify/verify.py", "logits", cwd=tmp_path)
    assert table.startswith("verify engines/example: rocketkv on retrieval-tiny")
    assert "max logit error" in table
    assert table.splitlines()[-1].startswith("PASSED")


@pytest.mark.slow
def test_an_engine_is_profiled(tmp_path: Path) -> None:
    one, eight, *findings = printed("03_profile/measure.py", "256", cwd=tmp_path).splitlines()
    assert one.startswith("  256 tokens, batch 1: ")
    assert eight.startswith("  256 tokens, batch 8: ")
    assert all(finding.startswith("- ") for finding in findings)
    assert any("of the copy-bandwidth floor" in finding for finding in findings)


@pytest.mark.slow
def test_a_policy_of_the_users_own_is_built_verified_and_asked(tmp_path: Path) -> None:
    assert printed("04_policy_of_your_own/own_policy.py", cwd=tmp_path).splitlines() == [
        "keydiff-hybrid: keydiff x hybrid",
        "of a prompt 256 tokens stay, a step reads 32, pages of 3",
        "passed",
        ANSWER,
    ]


def test_a_conversation_goes_on_and_a_saved_context_too(tiny_model: Path, tmp_path: Path) -> None:
    model = with_template(tiny_model, tmp_path / "model")
    asked = text(20, 21), text(22)
    script = "05_conversation_and_context/conversation.py"
    first, second, loaded = printed(script, str(model), *asked, cwd=tmp_path).splitlines()
    assert first.startswith(f"{asked[0]} '")
    assert second.startswith(f"{asked[1]} '")
    seen = [int(line.split()[-3]) for line in (first, second)]
    assert seen[1] > seen[0]
    assert loaded.split(": ")[1] == first.split(", ")[0].removeprefix(f"{asked[0]} "), "the same answer from the file"


@pytest.mark.slow
def test_an_engine_is_served(tmp_path: Path) -> None:
    command = tmp_path / "kvc-trt"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kvc_trt "$@"\n')
    command.chmod(0o700)
    answers = printed("06_serve/serve.sh", cwd=tmp_path, KVC_TRT=str(command))
    assert '"served"' in answers
    assert ANSWER in answers


def test_every_folder_has_a_short_page_and_a_script_and_is_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for folder in FOLDERS:
        page = [line for line in (folder / "README.md").read_text(encoding="utf-8").splitlines()[1:] if line]
        assert 3 <= len(page) <= 8, folder
        [script] = [path for path in folder.iterdir() if path.suffix in (".py", ".sh")]
        lines = script.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 30, script
        assert f"({folder.name}/README.md)" in listed
        assert f"{folder.name}/{script.name}" in "\n".join(page)
        assert f"{folder.name}/{script.name}" in Path(__file__).read_text(encoding="utf-8"), "run by a test"
