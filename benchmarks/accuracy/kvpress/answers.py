"""The questions of `benchmarks.accuracy.smollm2.grid`, answered by transformers and kvpress in their environment.

    build/peers/bin/python -m benchmarks.accuracy.kvpress.answers --questions FILE --model DIR [--minutes 60]

Every press keeps as many tokens as a policy's budget leaves of the prompt, as many as fit in the bytes that RocketKV
stores, and the shares of kvpress's leaderboard. Presses share a prefill: each press's own `score` runs in its own
place, behind a layer's attention, and its own `compress` on the layer's full cache when the prefill is done. Their
caches are decoded together (`benchmarks.accuracy.kvpress.rows`). AdaKV masks tokens of a cache that stays whole: it
frees nothing, and is asked at equal token budgets only.

Answers are greedy, with the positions of the text, as in kvpress's pipeline. Writes a line per question to a file of
build/accuracy that is named after the checkpoint and kvpress's version, so that a stopped run goes on and no answers
of others are taken, and benchmarks/results/accuracy-smollm2-kvpress.json with every line that is there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from benchmarks import machine, store
from benchmarks.accuracy.kvpress.onednn_products import use_onednn
from benchmarks.accuracy.kvpress.presses import Compressor, whole_rows
from benchmarks.accuracy.kvpress.rows import Decoding, Layers, Rows
from kvc_trt.files.atomic import write_whole
from kvc_trt.machine import usable_cores
from kvc_trt.tasks.registry import task
from kvc_trt.tasks.task import string_match_all

NAME = "accuracy-smollm2-kvpress"
RATIOS = (0.25, 0.5, 0.75, 0.875)
"""Shares that are removed, of kvpress's leaderboard."""
LARGEST_WINDOW = 64
"""SnapKV's: a press that keeps fewer tokens than it observes keeps part of the window alone."""
HELD_TOKENS = 6_500
"""Tokens that each press may keep, all amounts decoded together: of five presses on SmolLM2 that is 1.4 GiB."""


@dataclass(frozen=True)
class Point:
    """The number of tokens kept of a prompt, under a name."""

    label: str
    """budget 256, bytes of rocketkv 256, ratio 0.5, or full."""
    kept: int
    """Tokens of the prompt."""


def points_of(group: Mapping[str, Any], length: int, bytes_per_token: int) -> list[Point]:
    """Return the points for a prompt of `length` tokens; budgets and bytes hold the answer too, as for policies."""
    room = group["output_tokens"]
    found = [Point("full", length)]
    for budget, row_bytes in group["row_bytes"].items():
        found.append(Point(f"budget {budget}", int(budget) - room))
        found.append(Point(f"bytes of rocketkv {budget}", row_bytes // bytes_per_token - room))
    found += [Point(f"ratio {ratio}", int(length * (1 - ratio))) for ratio in RATIOS]
    return [Point(point.label, min(point.kept, length)) for point in found if point.kept > LARGEST_WINDOW]


@dataclass
class Row:
    """One answer on its way."""

    tokens: list[int] = field(default_factory=list)
    done: bool = False


class Asked:
    """One question of a group, and how it is scored."""

    def __init__(self, group: Mapping[str, Any], index: int, tokenizer: Any, ends: frozenset[int]) -> None:
        found = group["questions"][index]
        self.prompt, self.late, self.target = found["prompt"], found["late"], found["target"]
        self.answers, self.room = found["answers"], group["max_new_tokens"]
        self._rate, self._tokenizer, self._ends = task(group["task"]).score, tokenizer, ends

    def said(self, row: Row, logits: torch.Tensor) -> None:
        """Take the best token; a tie takes the lowest id."""
        row.tokens.append(int(logits.argmax()))
        complete = self._rate is string_match_all and self.score(row) == 1
        row.done = complete or row.tokens[-1] in self._ends or len(row.tokens) >= self.room

    def score(self, row: Row) -> float:
        """Return the score of a row's answer, computed as our own benchmark does for the same task."""
        assert self._rate is not None
        return self._rate(self._tokenizer.decode(row.tokens, skip_special_tokens=True), self.answers)


def decoded(model: PreTrainedModel, asked: Asked, first: torch.Tensor, groups: Sequence[Rows]) -> list[float]:
    """Return the score of every row, in the order of the groups: of an answer, or of the true continuation."""
    decoding = Decoding(model, groups, len(asked.prompt))

    def fed(tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        return decoding.logits(decoding.feed(tokens)[:, -1])

    if asked.target:
        late = decoding.feed([asked.late] * decoding.rows)[:, -1:] if asked.late else None
        rest = decoding.feed([asked.target[:-1]] * decoding.rows)
        return [
            _surprise(torch.cat([first if late is None else decoding.logits(late[row]), decoding.logits(one)]), asked)
            for row, one in enumerate(rest)
        ]
    logits = fed([asked.late] * decoding.rows) if asked.late else first.expand(decoding.rows, -1)
    answers = [Row() for _ in range(decoding.rows)]
    while True:
        for row, best in zip(answers, logits, strict=True):
            if not row.done:
                asked.said(row, best)
        if all(row.done for row in answers):
            return [asked.score(row) for row in answers]
        logits = fed([[row.tokens[-1]] for row in answers])


def _surprise(logits: torch.Tensor, asked: Asked) -> float:
    """Mean negative log-likelihood of the true continuation under logits [tokens, vocabulary], in nats."""
    likelihoods = torch.log_softmax(logits.double(), -1)
    return round(float(-likelihoods.gather(1, torch.tensor(asked.target)[:, None]).mean()), 6)


@torch.inference_mode()
def answered(model: PreTrainedModel, asked: Asked, points: Sequence[Point]) -> dict[tuple[str, int], float]:
    """Return the score of every press at every number of tokens kept, after one prefill."""
    compressor, cache, length = Compressor(model), DynamicCache(), len(asked.prompt)
    with compressor.scoring():
        first = model(torch.tensor([asked.prompt]), past_key_values=cache, logits_to_keep=1).logits[:, -1]
    layers: list[Any] = cache.layers
    full: Layers = [(layer.keys, layer.values) for layer in layers]
    masked = {point.kept for point in points if point.label.startswith("budget")}
    room = len(asked.late) + len(asked.target or range(asked.room))
    scores: dict[tuple[str, int], float] = {}
    for some in held_together(sorted({point.kept for point in points if point.kept < length})) or [[]]:
        groups = [] if scores else [whole_rows(("full", length), full, room)]
        groups += [compressor.scorers(full, amount, room) for amount in some]
        groups += [compressor.masked(full, amount, room) for amount in some if amount in masked]
        names = [name for group in groups for name in group.names]
        scores |= dict(zip(names, decoded(model, asked, first, groups), strict=True))
    return scores


def held_together(amounts: Sequence[int]) -> list[list[int]]:
    """Return the amounts in groups of at most HELD_TOKENS, or of one."""
    groups: list[list[int]] = []
    for amount in amounts:
        if not groups or sum(groups[-1]) + amount > HELD_TOKENS:
            groups.append([])
        groups[-1].append(amount)
    return groups


def main() -> None:
    """Ask the remaining questions, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True, help="questions.json of accuracy.smollm2.grid")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory, or a GGUF file")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--minutes", type=float, help="ask nothing new after this time")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    asked = json.loads(arguments.questions.read_text(encoding="utf-8"))
    kept = lines_path(asked)
    until = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    measure(load(arguments.model), asked, kept, until)
    print(write_result(asked, lines_of(kept)))


def lines_path(asked: Mapping[str, Any]) -> Path:
    """Return the path of the file with the answers of a checkpoint under this version of kvpress."""
    name = f"kvpress-{metadata.version('kvpress')}-{asked['settings']['checkpoint'][:12]}.jsonl"
    return machine.ROOT / "build" / "accuracy" / name


def lines_of(kept: Path) -> list[dict[str, Any]]:
    """Return a line per answered question. A last line that an ended run did not finish is removed from the file."""
    content = kept.read_bytes() if kept.is_file() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        write_whole(kept, whole)
    return [json.loads(line) for line in whole.decode("utf-8").splitlines()]


def load(path: Path) -> tuple[PreTrainedModel, Any]:
    """Return the model in float32, with oneDNN's products, and its tokenizer."""
    directory, options = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options).eval()
    use_onednn(model)
    return model, AutoTokenizer.from_pretrained(directory, **options)


def measure(loaded: tuple[PreTrainedModel, Any], asked: Mapping[str, Any], kept: Path, until: float | None) -> None:
    """Append a line per question that `kept` lacks, group by group."""
    model, tokenizer = loaded
    end = model.generation_config.eos_token_id
    ends = frozenset(end if isinstance(end, list) else [end])
    kept.parent.mkdir(parents=True, exist_ok=True)
    known = {_key(line) for line in lines_of(kept)}
    commit = machine.commit()
    for group in asked["groups"]:
        place = {name: group[name] for name in ("task", "mode", "length", "framing", "dataset", "output_tokens")}
        for index in range(group["asked"]):
            line: dict[str, Any] = {**place, "index": index}
            if _key(line) in known or (until is not None and time.monotonic() >= until):
                continue
            started, processor = time.monotonic(), time.process_time()
            question = Asked(group, index, tokenizer, ends)
            points = points_of(group, len(question.prompt), asked["bytes_per_token"])
            scores = answered(model, question, points)
            line["points"] = [
                {"press": press, "label": point.label, "kept": point.kept, "score": score}
                for point in points
                for (press, amount), score in scores.items()
                if amount == point.kept
            ]
            line |= {"seconds": round(time.monotonic() - started, 2), "commit": commit}
            line["processor_seconds"] = round(time.process_time() - processor, 2)
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{place['task']} {place['mode']} {place['framing']} {index}: {line['seconds']} s", flush=True)


def _key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return line["dataset"], line["mode"], line["framing"], line["index"]


def write_result(asked: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Path:
    """Write a cell per group, press and point: its scores and the tokens kept, in the order of the questions."""
    cells: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in sorted(lines, key=lambda one: one["index"]):
        place = {name: line[name] for name in ("task", "mode", "length", "framing", "dataset")}
        for point in line["points"]:
            named = {**place, "press": point["press"], "label": point["label"]}
            new = {**named, "output_tokens": line["output_tokens"], "kept": [], "scores": []}
            cell = cells.setdefault(tuple(named.values()), new)
            cell["kept"].append(point["kept"])
            cell["scores"].append(point["score"])
    record = machine.record()
    commits = list(dict.fromkeys(line["commit"] for line in lines)) or [record["commit"]]
    record["commit"] = ", ".join(sorted(commits, key=lambda one: str(one).endswith("-dirty")))
    record["versions"] = {**record["versions"], "kvpress": metadata.version("kvpress")}
    head = {"machine": record, "settings": asked["settings"], "bytes_per_token": asked["bytes_per_token"]}
    head["seconds"] = round(sum(line["seconds"] for line in lines))
    timed = [line["processor_seconds"] for line in lines if "processor_seconds" in line]
    head["processor_seconds_per_question"] = round(sum(timed) / len(timed), 2) if timed else None
    return store.write_result(NAME, {**head, "cells": list(cells.values())})


if __name__ == "__main__":
    main()
