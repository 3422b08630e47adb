"""The demo of a real chat model behaves as its page says, and so does the Python guide's example of a chat."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvc_trt.models.presets import load_preset

ROOT = Path(__file__).resolve().parents[1]
BOTH = r"^([^\n]* \([^\n]*\))\n  whole +([\d.]+) MiB  right  .*?\n  compressed +([\d.]+) MiB  (?:right|WRONG)  "
"""A question, and what the two caches take for it."""


@pytest.mark.slow
def test_two_caches_of_a_chat_model_answer_what_the_whole_one_answers(
    smollm2_gguf, tmp_path, monkeypatch, capsys, pytestconfig
):
    every = (ROOT / "docs" / "demo" / "island-questions.txt").read_text(encoding="utf-8").splitlines()
    questions = every if pytestconfig.option.everything else every[:3:2]
    (tmp_path / "questions.txt").write_text("\n".join(questions) + "\n")
    place = load_preset("smollm2-135m-instruct").file.place()
    place.parent.mkdir(parents=True)
    shutil.copyfile(smollm2_gguf, place)
    command = tmp_path / "kvc-trt"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kvc_trt "$@"\n')
    command.chmod(0o700)
    environment = {**os.environ, "KVC_TRT": str(command), "DEMO": str(tmp_path / "engines" / "chat")}
    environment |= {"PYTHON": sys.executable, "QUESTIONS": str(tmp_path / "questions.txt")}
    done = subprocess.run(
        ["sh", "docs/demo/chat.sh"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stderr
    [capital] = re.findall(r"\$ kvc-trt run .*?(?=\n\$)", done.stdout, re.DOTALL)
    assert "Paris" in capital
    shown = re.findall(BOTH, done.stdout, re.DOTALL | re.MULTILINE)
    needle, *ordinary = [(question, float(whole) / float(compressed)) for question, whole, compressed in shown]
    assert needle[0] == "What is the secret code of the blue warehouse? (4817)"
    assert len(ordinary) >= 1, "ordinary questions that the whole cache answers"
    assert all(ratio > 1.9 for _, ratio in (needle, *ordinary)), "bytes"
    answered, asked = re.search(r"^The whole cache answers (\d+) of (\d+) questions right", done.stdout, re.M).groups()
    assert (int(answered), int(asked)) == (len(shown), len(questions))
    assert "right  The secret code of the blue warehouse is 4817" in re.search("compressed .*", done.stdout)[0]
    assert re.search(r"^Of \d+ answers of the compressed cache \d+ equal .* \d+ are right", done.stdout, re.M)
    [example] = re.findall(
        r"^```python\n(.*?engines/chat.*?)^```", (ROOT / "docs" / "python.md").read_text(), re.S | re.M
    )
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/python.md", "exec"), {})
    assert "Paris" in capsys.readouterr().out
