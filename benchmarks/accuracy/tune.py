"""The bar of `kvc-trt tune` on a real chat model: the choice, the time that it takes, and how the choice holds up.

    python -m benchmarks.accuracy.tune [--checkpoint FILE.gguf] [--minutes 30] [--parts tune,small,held]

SmolLM2-135M-Instruct is asked for needles in 2,048 tokens, in three kinds of haystacks, as plain text that ends where
the answer begins.

- `tune`: 48 prompts and 12 MiB a row; the bar is 30 minutes on two cores.
- `small`: the same prompts and 1 MiB a row, for which no candidate should be good enough.
- `held`: 64 questions that `tune` has not seen, asked of the chosen engine, which is built anew from build.yaml, and of
  32 candidates. Its bar: the best of these is not distinguishable from it, and takes no fewer bytes.

Answers are kept in build/accuracy/tune, so a run that was stopped goes on where it was; the time of `tune` is then that
of all runs together. Writes benchmarks/results/tune.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvc_trt
from benchmarks import machine, store
from benchmarks.accuracy.smollm2.grid import MODEL
from benchmarks.accuracy.spent import Spent, record_of
from kvc_trt.accuracy.cell import Cell
from kvc_trt.accuracy.draw import FileDraw
from kvc_trt.accuracy.grid import CHAT, Variant
from kvc_trt.accuracy.measure import measure
from kvc_trt.accuracy.questions import ModelVocabulary, draw
from kvc_trt.accuracy.results import Results
from kvc_trt.accuracy.run import RESULTS_FILE
from kvc_trt.accuracy.under_test.model_under_test import BuiltEngine, ModelUnderTest
from kvc_trt.accuracy.under_test.policy_engines import ChosenModel, choose, loaded_model
from kvc_trt.files.atomic import write_whole
from kvc_trt.progress import progress_on
from kvc_trt.tasks.own.reader import line_of, read_data_file
from kvc_trt.tuning.differences import Qualities
from kvc_trt.tuning.prompts import OrderedPrompts
from kvc_trt.tuning.request import TuneRequest
from kvc_trt.tuning.rounds import WHOLE, groups_of
from kvc_trt.tuning.run import tune_model

NAME = "tune"
FOLDER = machine.ROOT / "build" / "accuracy" / NAME
TASKS = ("niah-single-1", "niah-single-2-prose", "niah-multikey-1-prose")
LENGTH, ANSWER = 2048, 12
CHOSEN_ON, HELD_BACK, NAMED = 48, 64, 32
"""Prompts of `tune`, of `held`, and the candidates that are asked these."""
ROWS, ROW, SMALL_ROW = 16, 12 << 20, 1 << 20
MINUTES = 30.0
SEEDS = {"tune": 101, "held": 202}


def data_file(chosen: ChosenModel, part: str, count: int) -> Path:
    """Write the questions of one part, as a user's file has them; return its path."""
    vocabulary = ModelVocabulary(chosen.tokenizer, chosen.config.vocab_size, chosen.template)
    share = -(-count // len(TASKS))
    lines = []
    for task in TASKS:
        drawn = draw(task, LENGTH - 8, vocabulary, samples=share, seed=SEEDS[part], max_new_tokens=ANSWER, framing=CHAT)
        for index, one in enumerate(drawn.samples):
            lines.append({
                "id": f"{task} {index}", "context": one.context, "question": one.question,
                "answers": list(one.answers), "score": "contains-all", "max_new_tokens": ANSWER, "template": False,
            })  # fmt: skip
    kept = [line for index in range(share) for line in lines[index::share]][:count]
    path = FOLDER / f"{part}.jsonl"
    write_whole(path, "".join(map(line_of, kept)).encode())
    return path


def tuned(data: Path, part: str, row: int, minutes: float | None, checkpoint: str | None) -> dict[str, Any]:
    """Run tune; return the result and the cost."""
    request = TuneRequest(data=data, memory=ROWS * row, rows=ROWS, directory=FOLDER / part, minutes=minutes)
    load = os.getloadavg()
    with Spent(FOLDER / part) as run:
        found = tune_model(MODEL, request, checkpoint=checkpoint, progress=progress_on()).to_json()
    return {
        "minutes": round(run.total["seconds"] / 60, 1),
        "processor_minutes": round(run.total["processor_seconds"] / 60, 1),
        "commits": run.total.get("commits", []),
        "load_before_and_after": [round(load[0], 1), round(os.getloadavg()[0], 1)],
        **{name: found[name] for name in ("finished", "prompts", "good_enough", "findings", "recommendation", "halves",
                                          "step_times", "rounds", "max_input_len", "max_output_len")},
        "whole": found["whole"]["quality"],
        "candidates": [{name: value for name, value in one.items() if name != "scores"} for one in found["candidates"]],
    }  # fmt: skip


def held_back(data: Path, chosen: ChosenModel, tune: dict[str, Any], minutes: float | None) -> dict[str, Any]:
    """Ask the questions that were held back of the rebuilt engine and of the first candidates of tune's table."""
    named = tune["candidates"][:NAMED]
    variants = [Variant(one["policy"], one["token_budget"]) for one in named]
    prompts = OrderedPrompts.of(FileDraw(read_data_file(data)), None, 0)
    length = tune["max_input_len"] + tune["max_output_len"]
    groups = groups_of(prompts, length, CHAT)
    until = None if minutes is None else time.monotonic() + 60 * minutes

    def asked(model: ModelUnderTest, some: Sequence[Variant], folder: Path) -> list[Cell]:
        with Results(folder / RESULTS_FILE, {**model.describe(), **prompts.settings()}) as results:
            return measure(model, some, groups, prompts, results, progress_on(), until=until)

    with loaded_model(chosen, progress=progress_on()) as engines:
        cells = asked(engines, list(dict.fromkeys([WHOLE, *variants])), FOLDER / "held")
    scores = {(cell.policy, cell.token_budget): list(cell.scores) for cell in cells}
    engine_path = FOLDER / "engine"
    shutil.rmtree(engine_path, ignore_errors=True)
    with kvc_trt.build(config=FOLDER / "tune" / "build.yaml", output=engine_path, verify=False) as engine:
        built = BuiltEngine(engine.directory, engine.backend)
        rebuilt = asked(built, built.variants, FOLDER / "held-engine")[-1]
    count = min(len(one) for one in [*scores.values(), rebuilt.scores])
    own = "rebuilt"
    qualities: Qualities[Any] = Qualities(
        {own: rebuilt.scores[:count], **{str(one): scores[one.policy, one.token_budget][:count] for one in variants}}
    )
    sizes = {str(variant): one["row_bytes"] for variant, one in zip(variants, named, strict=True)}
    best = min(sizes, key=lambda one: (-qualities.mean(one), sizes[one]))
    low, high = qualities.behind(own, best)
    mine = tune["recommendation"]
    same = list(rebuilt.scores[:count]) == list(qualities.by_name[mine["chosen"]])
    return {
        "questions": count,
        "candidates": len(named),
        "chosen": mine["chosen"],
        "rebuilt_answers_as_in_memory": same,
        "quality": qualities.mean(own),
        "best": best,
        "best_quality": qualities.mean(best),
        "best_is_better_by": [qualities.mean(best) - qualities.mean(own), low, high],
        "row_bytes": mine["row_bytes"],
        "best_row_bytes": sizes[best],
        "whole_quality": sum(scores["full", None][:count]) / count,
        "qualities": {name: qualities.mean(name) for name in sizes},
        "holds": low <= 0 and mine["row_bytes"] <= sizes[best],
    }


def main() -> None:
    """Run the parts, and write the results so far."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="the model's GGUF file, where the preset does not find it")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["tune", "small", "held"])
    parser.add_argument("--minutes", type=float, help="of each part; what is missing is asked by the next run")
    arguments = parser.parse_args()
    chosen = choose(MODEL, checkpoint=arguments.checkpoint)
    kept = FOLDER / "found.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {}
    data = data_file(chosen, "tune", CHOSEN_ON)
    for part, row in (("tune", ROW), ("small", SMALL_ROW)):
        if part in arguments.parts:
            found[part] = tuned(data, part, row, arguments.minutes, arguments.checkpoint)
            write_whole(kept, json.dumps(found).encode())
    if "held" in arguments.parts:
        held = data_file(chosen, "held", HELD_BACK)
        found["held"] = held_back(held, chosen, found["tune"], arguments.minutes)
        write_whole(kept, json.dumps(found).encode())
    bars = {
        "tune_within_minutes": "tune" in found and found["tune"]["finished"] and found["tune"]["minutes"] <= MINUTES,
        "nothing_is_good_enough_in_1_mib": "small" in found and not found["small"]["good_enough"],
        "choice_holds": "held" in found and found["held"]["questions"] == HELD_BACK and found["held"]["holds"],
    }
    commits = list(dict.fromkeys(one for part in found.values() for one in part.get("commits", [])))
    result = {"machine": record_of({"commits": commits}), "bars": bars, **found}
    print(store.write_result(NAME, result))
    for name, holds in bars.items():
        print(f"{name}: {'holds' if holds else 'does not hold, or was not measured'}")


if __name__ == "__main__":
    main()
