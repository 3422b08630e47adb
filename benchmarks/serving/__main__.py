"""Measures the real servers under the load of real tools, and writes the page.

    make bench-serving                                   # three minutes of load for each point
    python -m benchmarks.serving --select dynamo --minutes 5
    python -m benchmarks.serving --rounds 5 --minutes 1 --select light-tiny,dynamo-tiny   # in turns, five times
    python -m benchmarks.serving --quick                 # two points of the shipped model, a few seconds each
    python -m benchmarks.serving --page                  # docs/results/serving.md again from the results

A run goes on where the last one of the same commit stopped; every point is written at once.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import store
from benchmarks.machine import ROOT
from benchmarks.serving import page
from benchmarks.serving.engines import KINDS
from benchmarks.serving.measure import measure, prepare
from benchmarks.serving.place import Place
from benchmarks.serving.points import QUICK, Point, selected
from benchmarks.store import Growing

EMPTY: dict[str, Any] = {"command": "", "versions": {}, "points": {}}
_STARTING_SECONDS = 45
"""Time of one point beside its load: a server, a warm-up, a tool, and the answers that end last."""
_QUICK_SECONDS, _QUICK_CLIENTS = 3.0, 4


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.page:
        print(page.write(store.recorded(page.NAME, "make bench-serving")))
        return
    place = Place(
        arguments.work.resolve(), arguments.triton.absolute(), arguments.dynamo.absolute(), arguments.aiperf.absolute(),
        arguments.checkpoint,
    )  # fmt: skip
    missing = place.missing()
    if missing is not None:
        raise SystemExit(f"error: {missing}")
    points = selected(",".join(QUICK) if arguments.quick else arguments.select)
    for kind in dict.fromkeys(point.kind for point in points):
        print(f"{kind}: the engine and its answers without a server", flush=True)
        prepare(KINDS[kind], place)
    if arguments.prepare:
        return
    if arguments.rounds:
        _measure_in_turns(points, place, arguments)
        return
    # Results of a quick run are nobody's, and lie with those of changed code.
    path = store.UNCOMMITTED / f"{page.NAME}-quick.json" if arguments.quick else None
    result = Growing.open(page.NAME, EMPTY, fresh=arguments.fresh, path=path)
    result.data["command"] = shlex.join(["python", "-m", "benchmarks.serving", *sys.argv[1:]])
    result.data["versions"] = place.versions()
    _measure_all(points, place, result, arguments)
    if result.data["points"]:
        folder = None if result.path.parent == store.RESULTS else result.path.parent
        print(page.write(result.data, folder))


def _measure_all(points: list[Point], place: Place, result: Growing, arguments: argparse.Namespace) -> None:
    seconds = _QUICK_SECONDS if arguments.quick else 60 * arguments.minutes
    clients = _QUICK_CLIENTS if arguments.quick else arguments.clients
    deadline = time.monotonic() + 60 * arguments.within
    for point in points:
        if point.name in result.data["points"]:
            continue
        if time.monotonic() + seconds + _STARTING_SECONDS > deadline:
            print(f"{point.name} and what follows do not fit; the same command goes on", file=sys.stderr)
            return
        found = measure(point, place, clients=clients, seconds=seconds)
        result.data["points"][point.name] = found
        result.write()
        print(
            f"{point.name}: {found['answered']} of {found['sent']} answered in {found.get('seconds', 0):.0f} s, "
            f"{found.get('answer_tokens_per_second', 0):.1f} tokens/s, others {found['others_share']:.0%}",
            flush=True,
        )


def _measure_in_turns(points: list[Point], place: Place, arguments: argparse.Namespace) -> None:
    """Measure all points once a round, so that changes on the machine meanwhile affect all of them alike."""
    result = Growing.open(page.IN_TURNS, {"command": "", "rounds": []}, fresh=arguments.fresh)
    result.data["command"] = shlex.join(["python", "-m", "benchmarks.serving", *sys.argv[1:]])
    rounds = result.data["rounds"]
    while len(rounds) < arguments.rounds:
        found = {
            point.name: measure(point, place, clients=arguments.clients, seconds=60 * arguments.minutes)
            for point in points
        }
        for one in found.values():
            del one["memory"]  # A line over time, which only a page of single points draws.
        rounds.append(found)
        result.write()
        figures = (f"{name} {one['answer_tokens_per_second']:.1f} tokens/s" for name, one in found.items())
        print(f"round {len(rounds)} of {arguments.rounds}: {', '.join(figures)}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    build = ROOT / "build"
    parser.add_argument("--select", default="", help="only points whose name holds one of these, by commas")
    parser.add_argument("--minutes", type=float, default=3, help="of load for each point (default 3)")
    parser.add_argument("--within", type=float, default=float("inf"), help="minutes in which all has to be measured")
    parser.add_argument("--clients", type=int, default=32, help="requests at once (default 32)")
    parser.add_argument("--rounds", type=int, default=0, help="measure the points in turns, this many times")
    parser.add_argument("--quick", action="store_true", help="a look whether everything runs")
    parser.add_argument("--prepare", action="store_true", help="build the engines and ask them, and measure nothing")
    parser.add_argument("--checkpoint", type=Path, help="SmolLM2's GGUF file (default: the one that is fetched)")
    parser.add_argument("--work", type=Path, default=build / "bench-serving", help="for engines and written files")
    parser.add_argument("--triton", type=Path, default=build / "triton", help="environment of make triton-env")
    parser.add_argument("--dynamo", type=Path, default=build / "dynamo", help="environment of make dynamo-env")
    parser.add_argument("--aiperf", type=Path, default=build / "aiperf", help="environment of make aiperf-env")
    parser.add_argument("--fresh", action="store_true", help="drop the results of this commit first")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the page")
    return parser


if __name__ == "__main__":
    main()
