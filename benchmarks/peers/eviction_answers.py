"""Answers under OpenVINO GenAI's own cache eviction, to the questions that kvc-trt's policies are asked.

    build/peers/bin/python -m benchmarks.peers.eviction_answers --questions questions.json --model EXPORTED_DIR

The questions are those of `python -m benchmarks.accuracy.smollm2.grid --questions`: token ids of prompts that end with
the question, and the right answers. At equal time its eviction stores as many tokens as a policy's budget, at equal
bytes as many as fit in what RocketKV stores at that budget, both caches counted in float32 (its own cache is in 8 bits,
so it needs a quarter of them). Runs in the peers' environment. Writes benchmarks/results/peers-eviction.json with the
score of every question, after each of them: a stopped run goes on.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from transformers import AutoTokenizer

from benchmarks import machine, store
from benchmarks.peers.runners.openvino_genai import ATTENTION_SINK, RECENT, scheduler
from kvc_trt.tasks.registry import task

NAME = "peers-eviction"
BLOCK = 32
"""Tokens of one block: the cache is evicted block by block, so sizes are multiples of it."""
_CACHE_GIGABYTES = 2


@dataclass(frozen=True)
class Point:
    """The size to which its eviction cuts a prompt's cache."""

    label: str
    stored_tokens: int | None
    """None: nothing is evicted."""


def points(group: Mapping[str, Any], bytes_per_token: int) -> list[Point]:
    """Return the full cache, then every budget in tokens and in the bytes of RocketKV."""
    found = [Point("full", None)]
    for budget, row_bytes in group["row_bytes"].items():
        found.append(Point(f"budget {budget}", int(budget)))
        found.append(Point(f"bytes of rocketkv {budget}", row_bytes // bytes_per_token))
    return [Point(one.label, one.stored_tokens and one.stored_tokens // BLOCK * BLOCK) for one in found]


def open_pipeline(model: Path, longest_prompt: int, point: Point, threads: int) -> openvino_genai.LLMPipeline:
    """In float32 arithmetic, so that eviction is all that differs."""
    recent = RECENT
    if point.stored_tokens is not None:
        # A small cache is divided in the proportions of the defaults: something has to be left to choose from.
        recent = min(RECENT, (point.stored_tokens - ATTENTION_SINK) // 2 // BLOCK * BLOCK)
    config = scheduler(_CACHE_GIGABYTES, longest_prompt + BLOCK, point.stored_tokens, recent)
    properties = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
    return openvino_genai.LLMPipeline(model, "CPU", scheduler_config=config, **properties)


def answers(
    pipeline: openvino_genai.LLMPipeline, tokenizer: Any, group: Mapping[str, Any], first: int, last: int
) -> Iterator[float]:
    """Yield the scores of questions first .. last - 1, as kvc-trt's bench scores them."""
    score = task(group["task"]).score
    assert score is not None
    settings = openvino_genai.GenerationConfig()
    settings.max_new_tokens, settings.do_sample, settings.apply_chat_template = group["max_new_tokens"], False, False
    settings.set_eos_token_id(tokenizer.eos_token_id)
    for question in group["questions"][first:last]:
        ids = np.array([question["prompt"]], np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        said = pipeline.generate(inputs, settings).tokens[0]
        yield score(tokenizer.decode(said, skip_special_tokens=True), question["answers"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="OpenVINO export with its tokenizer.json")
    parser.add_argument("--count", type=int, default=64, help="questions per group (default 64)")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    asked = json.loads(arguments.questions.read_text(encoding="utf-8"))
    record = machine.record()
    path = store.result_path(NAME, record)
    cells = store.cells_of(path)
    result = {"machine": record, "openvino_genai": openvino_genai.__version__, "cells": cells}
    deadline = time.monotonic() + 60 * arguments.minutes
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    for group in asked["groups"]:
        if group["mode"] != "query-aware" or group["questions"][0]["target"]:
            continue  # its eviction has no question that comes later, and tells no likelihoods
        count = min(arguments.count, len(group["questions"]))
        longest = max(len(question["prompt"]) for question in group["questions"]) + group["max_new_tokens"]
        for point in points(group, asked["bytes_per_token"]):
            cell = cell_of(cells, group, point)
            if len(cell["scores"]) >= count or time.monotonic() > deadline:
                continue
            pipeline = open_pipeline(arguments.model, longest, point, arguments.threads)
            for score in answers(pipeline, tokenizer, group, len(cell["scores"]), count):
                cell["scores"].append(score)
                store.write(path, result)
                if time.monotonic() > deadline:
                    break
            print(f"{group['task']} {group['length']} {point.label}: {np.mean(cell['scores']):.3f}", flush=True)


def cell_of(cells: list[dict[str, Any]], group: Mapping[str, Any], point: Point) -> dict[str, Any]:
    """Return the cell of these very questions, or a new one."""
    key = {name: group[name] for name in ("task", "mode", "length", "framing", "dataset")}
    key |= {"point": point.label, "stored_tokens": point.stored_tokens}
    for cell in cells:
        if all(cell[name] == value for name, value in key.items()):
            return cell
    cells.append({**key, "scores": []})
    return cells[-1]


if __name__ == "__main__":
    main()
