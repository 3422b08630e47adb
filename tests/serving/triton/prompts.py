"""Prompts for the shipped model in a real tritonserver, and its answers without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvc_trt
from kvc_trt.cli.main import run
from kvc_trt.runtime import Output

LAMP = "<record> lamp scarlet tiger lagos eight <query> lamp"
ANSWER = "scarlet tiger lagos eight"
PROMPTS = [LAMP.replace("<query>", "amber " * count + "<query>") for count in (0, 3, 40, 200, 700, 1500)]


def talkative_engine(folders: pytest.TempPathFactory, max_output_len: int) -> Path:
    """Build an engine whose answers can be long enough to be cancelled."""
    path = folders.mktemp("engines") / "talkative"
    kvc_trt.build(
        "retrieval-tiny", token_budget=64, prompt_budget=64, max_output_len=max_output_len, output=path, verify=False
    )
    return path


def answered_alone(engine: Path) -> list[Output]:
    """Return the engine's answer to each of PROMPTS alone, in 40 tokens."""
    opened = kvc_trt.Engine.open(engine)
    return [opened.generate(prompt, max_new_tokens=40, ignore_eos=True) for prompt in PROMPTS]


def answered_by_run(engine: Path, prompt: str, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the output of `kvc-trt run --json` for one prompt."""
    assert run(["run", str(engine), "--prompt", prompt, "--json"]) == 0
    (found,) = json.loads(capfd.readouterr().out)["outputs"]
    answered: dict[str, Any] = found
    return answered
