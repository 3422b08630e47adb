"""The engines that are served, built as a user builds them, and the answers of each without a server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.serving.load import Asked, Shape, digest
from benchmarks.serving.place import Place
from kvc_trt.files.atomic import write_json

if TYPE_CHECKING:
    from kvc_trt import Engine

ROWS = 32
"""Rows that engines are built for; servers take fewer."""


@dataclass(frozen=True)
class Kind:
    """One engine: its model, its policy and its questions."""

    name: str
    model: str
    policy: str
    token_budget: int | None
    max_input_len: int
    max_output_len: int
    load: Shape
    more: tuple[str, ...] = ()
    """Other options of its build."""

    def arguments(self) -> list[str]:
        """Return the options of `kvc-trt build`."""
        budget = [] if self.token_budget is None else ["--token-budget", str(self.token_budget)]
        lengths = ["--max-input-len", str(self.max_input_len), "--max-output-len", str(self.max_output_len)]
        return [
            "--model",
            self.model,
            "--policy",
            self.policy,
            *budget,
            *lengths,
            "--max-batch-size",
            str(ROWS),
            "--weights",
            "fp32",
            *self.more,
        ]


_CHAT = Shape((256, 2048), (32, 64), 32)
_TINY = Shape((64, 1024), (16, 32), 32)
KINDS = {
    kind.name: kind
    for kind in (
        Kind("tiny", "retrieval-tiny", "rocketkv", 64, 1536, 64, _TINY),
        Kind("smollm2", "smollm2-135m-instruct", "rocketkv", 128, 2112, 64, _CHAT),
        Kind("smollm2-full", "smollm2-135m-instruct", "full", None, 2112, 64, _CHAT),
    )
}


def build(kind: Kind, place: Place) -> Path:
    """Build the engine, unless one of these settings and this code exists, and return its directory."""
    target = place.work / "engines" / kind.name
    command = [sys.executable, "-m", "kvc_trt", "build", *kind.arguments(), "--no-verify", "--force", "-o", str(target)]
    if place.checkpoint is not None and kind.model != "retrieval-tiny":
        command += ["--checkpoint", str(place.checkpoint)]
    done = subprocess.run(command, env=place.variables(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: kvc-trt build of {kind.name}: {done.stderr.strip()}")
    return target


@dataclass(frozen=True)
class Expected:
    """One answer without a server."""

    text: str
    pieces: tuple[str, ...]
    """The texts of the first 1, 2, ... tokens."""
    margins: tuple[float, ...]
    """For each token, the distance of the two best logarithms of probabilities."""

    def margin_where_it_differs(self, text: str) -> float:
        """Return the margin at the first token that another text does not have."""
        for piece, margin in zip(self.pieces, self.margins, strict=True):
            if not text.strip().startswith(piece.strip().rstrip("\ufffd")):
                return margin
        return self.margins[-1]


def expected_answers(engine: Engine, asked: Sequence[Asked], place: Place) -> tuple[int, list[Expected]]:
    """Return the bytes of one row, and the answers of `kvc-trt run`, greedily and one by one; kept for the next run."""
    path = place.work / "answers" / f"{engine.directory.digest[:16]}-{digest(list(asked))}.json"
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
    else:
        with engine:
            row_bytes = engine.session().executor.state_bytes()
            found = {"row_bytes": row_bytes, "answers": [_answer(engine, one) for one in asked]}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found)
    answers = [Expected(one["text"], tuple(one["pieces"]), tuple(one["margins"])) for one in found["answers"]]
    return found["row_bytes"], answers


def _answer(engine: Engine, asked: Asked) -> dict[str, Any]:
    output = engine.generate(list(asked.prompt), max_new_tokens=asked.max_tokens, ignore_eos=True, logprobs=2)
    assert output.logprobs is not None, "they were asked for"
    ids, tokenizer = list(output.token_ids), engine.directory.tokenizer
    assert tokenizer is not None, "it answers text"
    return {
        "text": output.text,
        "pieces": [tokenizer.decode(ids[: count + 1]) for count in range(len(ids))],
        "margins": [one.top[0][1] - one.top[1][1] for one in output.logprobs],
    }


def open_engine(path: Path) -> Engine:
    """Open an engine as `kvc-trt run` does."""
    from kvc_trt import Engine

    return Engine.open(path)
