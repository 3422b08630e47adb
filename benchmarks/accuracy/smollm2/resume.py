"""Puts the committed results of the real model's accuracy back into build/accuracy, so that the grid goes on from them.

    python -m benchmarks.accuracy.smollm2.resume

For a machine that did not measure them: `benchmarks.accuracy.smollm2.grid` and `benchmarks.accuracy.kvpress.answers`
ask the questions that their own files there lack. Files that are there stay as they are. Answers to other questions, or
of another checkpoint, are refused by those who go on from them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import machine, store
from benchmarks.accuracy.kvpress.answers import NAME as KVPRESS_NAME
from benchmarks.accuracy.smollm2.grid import NAME
from benchmarks.accuracy.spent import SPENT
from kvc_trt.accuracy.cell import Cell
from kvc_trt.accuracy.results import Results
from kvc_trt.accuracy.run import RESULTS_FILE
from kvc_trt.files.atomic import write_whole
from kvc_trt.tasks.dataset import VERSION
from kvc_trt.tasks.registry import task

MEASURES = "make bench-accuracy-smollm2"
PLACE = ("task", "mode", "length", "framing", "dataset", "output_tokens")
"""Fields by which kvpress's lines and cells name their group."""


def main() -> None:
    """Write both files where they are missing."""
    kept = machine.ROOT / "build" / "accuracy"
    print(restore_ours(store.recorded(NAME, MEASURES), kept / NAME))
    print(restore_kvpress(store.recorded(KVPRESS_NAME, MEASURES), kept))


def restore_ours(result: Mapping[str, Any], directory: Path) -> Path:
    """Our policies' cells, and the time that they took."""
    path = directory / RESULTS_FILE
    if not path.exists():
        with Results(path, {**result["settings"], "tasks_version": VERSION}) as results:
            for stored in result["cells"]:
                family, seed = task(stored["task"]).family, result["settings"]["seed"]
                budget = {"token_budget": stored.get("token_budget")}
                results.append(
                    Cell.from_json({"scores": (), "depths": (), "family": family, "seed": seed, **stored, **budget})
                )
        write_whole(directory / SPENT, json.dumps(result["spent"]).encode())
    return path


def restore_kvpress(result: Mapping[str, Any], directory: Path) -> Path:
    """Write a line per question that all presses of a group answered at every point, as kvpress's side writes them."""
    name = f"kvpress-{result['machine']['versions']['kvpress']}-{result['settings']['checkpoint'][:12]}.jsonl"
    path = directory / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(f"{json.dumps(line)}\n" for line in _lines(result)).encode())
    return path


def _lines(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for cell in result["cells"]:
        groups[tuple(cell[name] for name in PLACE)].append(cell)
    count = sum(max(len(cell["scores"]) for cell in cells) for cells in groups.values())
    for place, cells in groups.items():
        for index in range(min(len(cell["scores"]) for cell in cells)):
            points = [
                {
                    "press": cell["press"],
                    "label": cell["label"],
                    "kept": cell["kept"][index],
                    "score": cell["scores"][index],
                }
                for cell in cells
            ]
            spent = {"seconds": round(result["seconds"] / count, 2), "commit": result["machine"]["commit"]}
            yield {**dict(zip(PLACE, place, strict=True)), "index": index, "points": points, **spent}


if __name__ == "__main__":
    main()
