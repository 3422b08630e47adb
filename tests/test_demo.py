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


@pytest.mark.slow
def test_a_chat_model_answers_and_finds_a_sentence_in_a_long_text(smollm2_gguf, tmp_path, monkeypatch, capsys):
    place = load_preset("smollm2-135m-instruct").file.place()
    place.parent.mkdir(parents=True)
    shutil.copyfile(smollm2_gguf, place)
    command = tmp_path / "kvc-trt"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kvc_trt "$@"\n')
    command.chmod(0o700)
    environment = {**os.environ, "KVC_TRT": str(command), "DEMO": str(tmp_path / "engines" / "chat")}
    done = subprocess.run(
        ["sh", "docs/demo/chat.sh"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stderr
    capital, code = re.findall(r"\$ kvc-trt run .*?(?=\n\$|\Z)", done.stdout, re.DOTALL)
    assert "Paris" in capital
    assert "4817" in code.splitlines()[-2]
    kept, read = map(int, re.search(r"cache (\d+) of (\d+) tokens per layer", code).groups())
    assert read > 4000
    assert kept < read / 4
    [example] = re.findall(
        r"^```python\n(.*?engines/chat.*?)^```", (ROOT / "docs" / "python.md").read_text(), re.S | re.M
    )
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/python.md", "exec"), {})
    assert "Paris" in capsys.readouterr().out
