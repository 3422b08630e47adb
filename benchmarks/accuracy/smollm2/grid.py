"""Accuracy of every policy on a real chat model, SmolLM2-135M-Instruct, stage by stage.

    python -m benchmarks.accuracy.smollm2.grid [--checkpoint FILE.gguf] [--stages needles,likelihood] [--minutes 60]

The stages (`benchmarks.accuracy.smollm2.stages`) stand in the order in which they decide something; the first ones are
the core grid, `--stages all` asks for the rest. Results are kept in build/accuracy/, some questions at a time, so a run
that was stopped goes on where it was. Writes benchmarks/results/accuracy-smollm2.json with the score of every question,
and questions.json beside the kept results: the same token ids for `benchmarks.accuracy.kvpress.answers`.
`benchmarks.accuracy.smollm2.page` writes the page.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, store
from benchmarks.accuracy.smollm2.stages import (
    BUDGETS,
    CORE,
    LONGEST_ANSWERS,
    ROCKETKV,
    SAMPLES,
    STAGES,
    Stage,
    estimate,
)
from benchmarks.accuracy.spent import Spent, record_of
from kvc_trt.accuracy.cell import Cell
from kvc_trt.accuracy.draw import QuestionDraw
from kvc_trt.accuracy.grid import QuestionGroup, Variant
from kvc_trt.accuracy.measure import GroupMeasurement, measure
from kvc_trt.accuracy.questions import ModelVocabulary, QuestionSet, ask, draw
from kvc_trt.accuracy.results import Results
from kvc_trt.accuracy.run import RESULTS_FILE
from kvc_trt.accuracy.under_test.policy_engines import PolicyEngines, open_model
from kvc_trt.files.atomic import write_whole
from kvc_trt.progress import progress_on
from kvc_trt.tasks.dataset import VERSION

MODEL = "smollm2-135m-instruct"
NAME = "accuracy-smollm2"
SEED = 0


def main() -> None:
    """Measure the stages, and write the result and the questions."""
    arguments = _parsed()
    directory = machine.ROOT / "build" / "accuracy" / NAME
    names = list(STAGES if arguments.stages == ["all"] else arguments.stages)
    until = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    with open_model(arguments.model, checkpoint=arguments.checkpoint, progress=progress_on()) as model:
        if arguments.questions:
            print(estimate(names))
            print(write_questions(model, names, directory))
            return
        with Spent(directory) as run:
            settings, cells = measured(model, names, directory, until)
    print(write_result(settings, cells, run.total))


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="the preset, or a Hugging Face directory of the same model")
    parser.add_argument("--checkpoint", help="the model's GGUF file, where the preset does not find it")
    parser.add_argument("--stages", type=lambda text: text.split(","), default=list(CORE), help="names, or all")
    parser.add_argument("--minutes", type=float, help="ask nothing new after this time")
    parser.add_argument("--questions", action="store_true", help="only write the stages' questions")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.stages if name not in (*STAGES, "all")]:
        parser.error(f"unknown stage {unknown[0]}; there are {', '.join(STAGES)}")
    return arguments


def measured(
    model: PolicyEngines, names: Sequence[str], directory: Path, until: float | None
) -> tuple[dict[str, Any], list[Cell]]:
    """Return the settings, and every cell that is known: of these stages, and of those that were measured before."""
    settings = {**model.describe(), "samples": SAMPLES, "seed": SEED, "max_new_tokens": LONGEST_ANSWERS}
    progress = progress_on()
    with Results(directory / RESULTS_FILE, {**settings, "tasks_version": VERSION}) as results:
        for name in names:
            progress.note(f"stage {name}")
            stage = STAGES[name]
            measure(model, stage.variants, stage.groups, _draw(stage), results, progress, until=until)
        return settings, list(results.cells.values())


def write_result(settings: dict[str, Any], cells: Sequence[Cell], spent: dict[str, Any]) -> Path:
    """Write the cells with the score of every question."""
    head = {"machine": record_of(spent), "settings": settings, "spent": spent}
    return store.write_result(NAME, {**head, "cells": [compact(cell.to_json()) for cell in cells]})


def write_questions(model: PolicyEngines, names: Sequence[str], directory: Path) -> Path:
    """Write the questions as token ids, with the sizes that policies store of them, which another engine is asked to
    keep.

    Those of the stages that ask RocketKV, which the others are set beside.
    """
    vocabulary = ModelVocabulary(model.tokenizer, model.config.vocab_size, model.template)
    known: dict[QuestionGroup, dict[str, Any]] = {}
    for stage in (stage for name in names if (stage := STAGES[name]).beside_kvpress):
        for group in stage.groups:
            rule = _draw(stage)
            drawn = draw(
                group.task, group.length, vocabulary, samples=rule.samples, seed=rule.seed,
                max_new_tokens=rule.room(group.task), framing=group.framing,
            )  # fmt: skip
            asked = known.get(group, {}).get("asked", 0)
            known[group] = _asked(model, ask(group, drawn, vocabulary), max(asked, stage.asked))
    path = directory / "questions.json"
    content = {"settings": model.describe(), "bytes_per_token": _bytes_per_token(model), "groups": list(known.values())}
    write_whole(path, json.dumps(content).encode())
    return path


def _asked(model: PolicyEngines, questions: QuestionSet, count: int) -> dict[str, Any]:
    measurement = GroupMeasurement(model, questions, SEED)
    room = measurement.room
    return {
        **vars(questions.group),
        "asked": count,
        "dataset": questions.digest,
        "max_new_tokens": questions.max_new_tokens,
        "output_tokens": room.max_output_len,
        "row_bytes": {str(budget): model.row_bytes(Variant(ROCKETKV, budget), room) for budget in BUDGETS},
        "questions": [
            {
                "prompt": one.prompt_ids,
                "late": one.continuation_ids,
                "target": one.target_ids,
                "answers": sample.answers,
            }
            for one, sample in zip(questions.flat[:count], questions.samples, strict=False)
        ],
    }


def _bytes_per_token(model: PolicyEngines) -> int:
    """K and V of one token in all layers, in fp32."""
    config = model.config
    return 4 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_size


def _draw(stage: Stage) -> QuestionDraw:
    return QuestionDraw(SAMPLES, SEED, LONGEST_ANSWERS, stage.asked)


def compact(cell: dict[str, Any]) -> dict[str, Any]:
    dropped = {"depths", "parameters", "seed", "family", "query_aware", "evidence", "full_scores", "full_accuracy"}
    dropped |= {"equal", "first_differences"}  # nothing is followed here
    return {name: _short(value) for name, value in cell.items() if name not in dropped and value not in (None, "")}


def _short(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_short(one) for one in value]
    if isinstance(value, float):
        return int(value) if value.is_integer() else round(value, 4)
    return value


if __name__ == "__main__":
    main()
