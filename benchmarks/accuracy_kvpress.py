"""The questions of `benchmarks.accuracy_smollm2`, answered by transformers and NVIDIA kvpress, in their environment.

    build/peers/bin/python -m benchmarks.accuracy_kvpress --questions FILE --model DIR [--minutes 60]

Every press keeps as many tokens as a policy's budget leaves of the prompt, as many as fit in the bytes that RocketKV
stores, and the shares of kvpress's leaderboard. Presses share a prefill: each press's own `compress` runs in its
own place, behind a layer's attention, on the layer's full cache, and what it returns is kept aside, so that the next
press finds the cache whole. Presses that keep equally many tokens are decoded as rows of one batch. AdaKV masks tokens
of a cache that stays whole: it frees nothing, is decoded alone, and is asked at equal token budgets only.

Answers are greedy, with the positions of the text, as in kvpress's pipeline. Writes a line per question to a file of
build/accuracy that is named after the checkpoint and kvpress's version, so that a stopped run goes on and no answers
of others are taken, and benchmarks/results/accuracy-smollm2-kvpress.json with every line that is there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from benchmarks import machine
from kvc_trt.atomic_files import write_whole
from kvc_trt.machine import usable_cores
from kvc_trt.tasks.registry import task
from kvc_trt.tasks.task import string_match_all

NAME = "accuracy-smollm2-kvpress"
RATIOS = (0.25, 0.5, 0.75, 0.875)
"""Shares that are removed, of kvpress's leaderboard."""
SCORERS = {
    "snapkv": "SnapKVPress",
    "streaming-llm": "StreamingLLMPress",
    "expected-attention": "ExpectedAttentionPress",
    "knorm": "KnormPress",
    "tova": "TOVAPress",
}
"""kvpress's classes, each with its defaults."""
SCORED_BY_AMOUNT = ("streaming-llm",)
"""Presses whose scores depend on how much is kept; those of the others are computed once per layer."""
ADAKV = "adakv-snapkv"
LARGEST_WINDOW = 64
"""SnapKV's: a press that keeps fewer tokens than it observes keeps part of the window alone."""
HELD_TOKENS = 9_000
"""Tokens that each press may keep of one prefill, all amounts together; of five presses on SmolLM2 that is 2 GiB."""
Layers = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Point:
    """How much is kept of a prompt."""

    label: str
    """budget 256, bytes of rocketkv 256, ratio 0.5, or full."""
    kept: int
    """Tokens of the prompt."""


@dataclass
class Compressed:
    """What the presses made of one prompt, layer by layer, by press and tokens kept."""

    layers: dict[tuple[str, int], Layers] = field(default_factory=lambda: defaultdict(list))
    masks: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    """AdaKV's indices per layer, by tokens kept."""


def points_of(group: Mapping[str, Any], length: int, bytes_per_token: int) -> list[Point]:
    """What is kept of a prompt of `length` tokens; budgets and bytes hold the answer too, as those of policies do."""
    room = group["output_tokens"]
    found = [Point("full", length)]
    for budget, row_bytes in group["row_bytes"].items():
        found.append(Point(f"budget {budget}", int(budget) - room))
        found.append(Point(f"bytes of rocketkv {budget}", row_bytes // bytes_per_token - room))
    found += [Point(f"ratio {ratio}", int(length * (1 - ratio))) for ratio in RATIOS]
    return [Point(point.label, min(point.kept, length)) for point in found if point.kept > LARGEST_WINDOW]


@contextmanager
def recording(model: PreTrainedModel, kept: Iterable[int], masked: Sequence[int]) -> Iterator[Compressed]:
    """Within it, a prefill leaves every press's cache in what is yielded, and the model's own cache whole.

    Scoring presses keep each number of tokens of `kept`, AdaKV each of `masked`.
    """
    import kvpress

    found, amounts = Compressed(), sorted(set(kept))
    presses = {name: getattr(kvpress, press)() for name, press in SCORERS.items()}
    for press in presses.values():
        press.post_init_from_model(model)

    def behind_attention(module: Any, _: Any, kwargs: Any, output: Any) -> None:
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        hidden, keys, values = kwargs["hidden_states"], layer.keys, layer.values
        for name, press in presses.items():
            if name not in SCORED_BY_AMOUNT:
                scores = type(press).score(press, module, hidden, keys, values, None, kwargs)
                press.score = lambda *_, scores=scores, **__: scores.clone()
            for amount in amounts:
                press.compression_ratio = ratio_for(amount, keys.shape[2])
                compressed = press.compress(module, hidden, keys, values, None, kwargs)
                found.layers[name, amount].append(compressed)
            if name == "snapkv":
                for amount in masked:
                    press.compression_ratio = ratio_for(amount, keys.shape[2])
                    kvpress.AdaKVPress(press).compress(module, hidden, keys, values, None, kwargs)
                    found.masks[amount].append(module.masked_key_indices)
                module.masked_key_indices = None
            vars(press).pop("score", None)

    hooks = []
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
        hooks.append(layer.self_attn.register_forward_hook(behind_attention, with_kwargs=True))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def ratio_for(kept: int, length: int) -> float:
    """The compression ratio at which kvpress keeps so many tokens: it rounds down."""
    return max(0.0, 1 - (kept + 0.5) / length)


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
        """As our own bench scores the same task."""
        assert self._rate is not None
        return self._rate(self._tokenizer.decode(row.tokens, skip_special_tokens=True), self.answers)


@torch.inference_mode()
def decoded(model: PreTrainedModel, asked: Asked, first: torch.Tensor, layers: Layers) -> list[float]:
    """The score of every row of a cache [rows, heads, tokens, size]: of an answer, or of the true continuation."""
    rows = layers[0][0].shape[0]
    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    position = len(asked.prompt)

    def fed(tokens: Sequence[Sequence[int]], *, last: bool) -> torch.Tensor:
        nonlocal position
        count = len(tokens[0])
        positions = torch.arange(position, position + count).expand(rows, -1)
        position += count
        found = model(
            torch.tensor(tokens), past_key_values=cache, position_ids=positions, logits_to_keep=1 if last else 0
        )
        return found.logits

    logits = fed([asked.late] * rows, last=True)[:, -1] if asked.late else first.expand(rows, -1)
    if asked.target:
        rest = fed([asked.target[:-1]] * rows, last=False)
        likelihoods = torch.log_softmax(torch.cat([logits[:, None], rest], 1).double(), -1)
        wanted = torch.tensor(asked.target).expand(rows, -1)[..., None]
        return [round(one, 6) for one in (-likelihoods.gather(2, wanted)[..., 0].mean(1)).tolist()]
    answers = [Row() for _ in range(rows)]
    while True:
        for row, best in zip(answers, logits, strict=True):
            if not row.done:
                asked.said(row, best)
        if all(row.done for row in answers):
            return [asked.score(row) for row in answers]
        logits = fed([[row.tokens[-1]] for row in answers], last=True)[:, -1]


@torch.inference_mode()
def answered(model: PreTrainedModel, asked: Asked, points: Sequence[Point]) -> dict[tuple[str, int], float]:
    """The score of every press at every number of tokens kept, one prefill for as many as memory holds."""
    length = len(asked.prompt)
    amounts = sorted({point.kept for point in points if point.kept < length})
    masked = {point.kept for point in points if point.label.startswith("budget")}
    scores: dict[tuple[str, int], float] = {}
    for some in held_together(amounts) or [[]]:
        scores |= _answered_at(model, asked, some, sorted(masked & set(some)), whole=not scores)
    return scores


def held_together(amounts: Sequence[int]) -> list[list[int]]:
    """The amounts in groups of at most HELD_TOKENS, or of one."""
    groups: list[list[int]] = []
    for amount in amounts:
        if not groups or sum(groups[-1]) + amount > HELD_TOKENS:
            groups.append([])
        groups[-1].append(amount)
    return groups


def _answered_at(
    model: PreTrainedModel, asked: Asked, amounts: Sequence[int], masked: Sequence[int], *, whole: bool
) -> dict[tuple[str, int], float]:
    """The scores at these numbers of tokens, AdaKV's at `masked`, and with `whole` that of the whole cache."""
    cache = DynamicCache()
    with recording(model, amounts, masked) as found:
        first = model(torch.tensor([asked.prompt]), past_key_values=cache, logits_to_keep=1).logits[:, -1]
    full = [(layer.keys, layer.values) for layer in cache.layers]
    del cache
    scores = {("full", len(asked.prompt)): decoded(model, asked, first, full)[0]} if whole else {}
    for amount in amounts:
        rows = [found.layers.pop((name, amount)) for name in SCORERS]
        joined = [tuple(torch.cat(parts) for parts in zip(*layer, strict=True)) for layer in zip(*rows, strict=True)]
        for name, score in zip(SCORERS, decoded(model, asked, first, joined), strict=True):
            scores[name, amount] = score
    for amount in masked:
        for layer, indices in zip(model.model.layers, found.masks[amount], strict=True):
            layer.self_attn.masked_key_indices = indices
        copied = [(keys.clone(), values) for keys, values in full]  # masked keys are overwritten in place
        scores[ADAKV, amount] = decoded(model, asked, first, copied)[0]
        for layer in model.model.layers:
            layer.self_attn.masked_key_indices = None
    return scores


def main() -> None:
    """Ask what is not known yet, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True, help="questions.json of benchmarks.accuracy_smollm2")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory, or a GGUF file")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--minutes", type=float, help="ask nothing new after so many")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    asked = json.loads(arguments.questions.read_text(encoding="utf-8"))
    kept = lines_path(asked)
    until = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    measure(load(arguments.model), asked, kept, until)
    print(write_result(asked, lines_of(kept)))


def lines_path(asked: Mapping[str, Any]) -> Path:
    """Where the answers of a checkpoint under this version of kvpress are kept."""
    name = f"kvpress-{metadata.version('kvpress')}-{asked['settings']['checkpoint'][:12]}.jsonl"
    return machine.ROOT / "build" / "accuracy" / name


def lines_of(kept: Path) -> list[dict[str, Any]]:
    """A line per answered question. The last one, where a run was ended while it wrote it, is removed from the file."""
    content = kept.read_bytes() if kept.is_file() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        write_whole(kept, whole)
    return [json.loads(line) for line in whole.decode("utf-8").splitlines()]


def load(path: Path) -> tuple[PreTrainedModel, Any]:
    """The model in float32 and its tokenizer."""
    directory, options = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options).eval()
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
    """A cell per group, press and point, its scores and what was kept of the prompts in the order of the questions."""
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
    body = ",\n".join(f"    {json.dumps(cell)}" for cell in cells.values())
    path = machine.result_path(NAME, record)
    write_whole(path, f'{json.dumps(head, indent=2)[:-2]},\n  "cells": [\n{body}\n  ]\n}}\n'.encode())
    return path


if __name__ == "__main__":
    main()
