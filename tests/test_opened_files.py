"""Whatever a user or a stranger names is opened in `kvc_trt/files/inputs.py`, and nowhere else.

A process with an audit hook runs the main commands on files in one folder. Whoever adds a reader that opens a file by
itself is named here; the system's own files, those of the package and those of its caches lie outside the folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvc_trt
from tests.conftest import TINY_BUILD
from tests.readable_model import text, with_template

ROOT = Path(__file__).parent.parent
OPENER = "files/inputs.py"
ALLOWED = {
    # They write files of their own, beside their place or into a directory that is not there yet.
    "files/atomic.py",
    "files/unfinished.py",
    "engine/writer.py",
}
QUESTION = text(20, 21, 22)


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A model, and one file of each kind that a command takes."""
    folder = tmp_path / "user"
    folder.mkdir()
    model = with_template(tiny_model, folder / "model")
    config = json.loads((model / "config.json").read_text())
    heads = "\t".join(["0.9"] + ["0.1"] * (config["num_key_value_heads"] - 1)) + "\n"
    (folder / "pattern.tsv").write_text(heads * config["num_hidden_layers"])
    (folder / "build.yaml").write_text(f"policy: duo-attention\nhead_pattern: {folder / 'pattern.tsv'}\n")
    (folder / "calibration.txt").write_text(f"{QUESTION * 30}\n", encoding="utf-8")
    (folder / "prompt.txt").write_text(QUESTION * 5, encoding="utf-8")
    (folder / "ids.json").write_text("[20, 21, 22]")
    (folder / "messages.json").write_text(json.dumps([{"role": "user", "content": QUESTION}]))
    return folder


def opened_by(folder: Path, commands: list[list[str]]) -> dict[str, int]:
    """Count by module how often the commands opened files of the folder; all commands must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.opened_files", str(folder)],
        input=json.dumps(commands), capture_output=True, text=True, cwd=ROOT, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["codes"] == [0] * len(commands), done.stderr
    opened: dict[str, int] = found["opened"]
    return opened


BRIEF = ("--max-new-tokens", "2", "--ignore-eos")
SIZES = TINY_BUILD[:-1]
"""The options without --no-verify, which `plan` does not take."""


def test_every_allowed_module_exists() -> None:
    assert [name for name in sorted(ALLOWED) if not (Path(kvc_trt.__file__).parent / name).is_file()] == []


def check(opened: dict[str, int], least: int) -> None:
    assert opened.keys() - {OPENER} <= ALLOWED
    assert opened[OPENER] >= least


def test_build_run_and_context_open_what_a_user_names_in_one_place(folder: Path) -> None:
    engine, context = str(folder / "engine"), str(folder / "context")
    model = ["--config", str(folder / "build.yaml"), "--model", str(folder / "model"), *SIZES]
    ask = ["run", engine, *BRIEF]
    commands = [
        ["plan", *model],
        ["build", *model, "--no-verify", "-o", engine],
        ["context", "save", engine, "--prompt-file", str(folder / "prompt.txt"), "--raw", "-o", context],
        ["context", "inspect", context],
        [*ask, "--context", context, "--prompt-ids", str(folder / "ids.json")],
        [*ask, "--messages", str(folder / "messages.json")],
        [*ask, "--chat", QUESTION, "--document", str(folder / "prompt.txt")],
    ]
    check(opened_by(folder, commands), 20)


@pytest.mark.slow
def test_proofs_and_accuracy_open_what_a_user_names_in_one_place(folder: Path) -> None:
    engine, proof = str(folder / "engine"), str(folder / "proof.json")
    squeeze = ["--policy", "snapkv-gqa", "--layer-budget", "squeeze", "--token-budget", "96"]
    sizes = ["--set", "window=16", "--max-input-len", "256", "--max-output-len", "32", "--no-verify"]
    calibrated = ["--set", f"calibration={folder / 'calibration.txt'}", *squeeze, *sizes]
    few = ["--target-tokens", "128", "--samples", "2"]
    commands = [
        ["build", "--model", str(folder / "model"), *calibrated, "-o", engine],
        ["build", "--config", f"{engine}/config.json", "--no-verify", "-o", engine],
        ["inspect", engine],
        ["run", engine, *BRIEF, "--prompt-ids", str(folder / "ids.json"), "--kv-proof", "lists", "-o", proof],
        ["verify", engine, "--replay", proof],
        ["verify", engine, "--level", "ops", "--steps", "1"],
        ["tasks", "write", "associative-recall", "--tokenizer", engine, "-o", str(folder / "set.jsonl"), *few],
        [
            *("verify", "--level", "tasks", "--model", "retrieval-tiny", "--tasks", "associative-recall"),
            *("--lengths", "128"),
            *("--samples", "5", "--policies", "hybrid", "--budgets", "64", "--output-dir", str(folder / "accuracy")),
        ],
    ]
    check(opened_by(folder, commands), 20)
