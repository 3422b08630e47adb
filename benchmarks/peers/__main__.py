"""Measures kvc-trt beside OpenVINO GenAI, onnxruntime-genai, llama.cpp and transformers, and writes the page.

    make bench-peers                                # the core: at most 20 minutes beside what has to be converted
    python -m benchmarks.peers --select full --minutes 240
    python -m benchmarks.peers --select quick       # one point, one round: a look whether everything runs
    python -m benchmarks.peers --select formats      # caches of 8 bits, into docs/results/peers-formats.md
    python -m benchmarks.peers --page               # docs/results/peers.md again from the results

A run goes on where the last one of the same commit stopped; every measurement is written at once.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import store
from benchmarks.machine import ROOT
from benchmarks.peers import contenders, formats_page, page
from benchmarks.peers.artefacts import Workplace, drop_other_engines, make
from benchmarks.peers.floors import bandwidths
from benchmarks.peers.points import SELECTIONS, Measurement, measurements
from benchmarks.peers.rounds import estimate, measure_all
from benchmarks.peers.runs import EMPTY, NAME, Runs, formats_name
from kvc_trt.backends.onnxruntime.native import native_operators
from kvc_trt.backends.registry import backends
from kvc_trt.machine import machine_record

_DEFAULT_PYTHON = ROOT / "build" / "peers" / "bin" / "python"


def main() -> None:
    arguments = _parser().parse_args()
    of_formats = arguments.select == "formats"
    if arguments.page:
        print(formats_page.write(formats_page.recorded()) if of_formats else page.write(_recorded(arguments.select)))
        return
    runs = Runs.open(formats_name(machine_record()) if of_formats else NAME, EMPTY, fresh=arguments.fresh)
    _measure(arguments, runs)
    if runs.data["measurements"]:
        print(formats_page.write(formats_page.recorded(beside=runs.data)) if of_formats else page.write(runs.data))


def _recorded(selection: str) -> dict[str, Any]:
    return store.recorded(NAME, f"make bench-peers SELECT={selection}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--select", choices=SELECTIONS, default="core")
    parser.add_argument("--rounds", type=int, help="runs of every measurement (default 3; quick: 1)")
    parser.add_argument("--minutes", type=float, default=20, help="time for measuring (default 20)")
    parser.add_argument("--only", default="", help="only contenders whose name contains this")
    parser.add_argument("--points", type=_pattern, default="", help="only points whose name matches, such as 'tokens$'")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--artefacts", type=Path, default=ROOT / "build" / "peer-models", help="where models are kept")
    parser.add_argument("--peers-python", type=Path, default=_DEFAULT_PYTHON, help="Python of the peers' environment")
    parser.add_argument("--fresh", action="store_true", help="drop the results of this commit first")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the page")
    return parser


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def _measure(arguments: argparse.Namespace, runs: Runs) -> None:
    if not arguments.peers_python.exists():
        raise SystemExit(f"error: no {arguments.peers_python}; make peers-env, or --peers-python")
    place = Workplace(
        arguments.artefacts.resolve(), arguments.peers_python.absolute(), arguments.threads,
        runs.data["machine"]["commit"],
    )  # fmt: skip
    drop_other_engines(place)
    chosen = _chosen(arguments)
    rounds = arguments.rounds or (1 if arguments.select == "quick" else 3)
    for measurement in chosen:
        make(measurement, place)
    runs.data["threads"] = arguments.threads
    if not runs.data["bandwidth"]:
        runs.data["bandwidth"] = bandwidths(arguments.threads)
    expected = estimate(chosen, runs, rounds)
    print(
        f"{len(chosen)} measurements, {rounds} rounds: about {expected / 60:.0f} minutes, "
        f"of which {arguments.minutes:g} may be used",
        flush=True,
    )
    started = time.monotonic()
    complete = measure_all(chosen, runs, place, rounds=rounds, minutes=arguments.minutes)
    spent = (time.monotonic() - started) / 60
    left = "" if complete else "; the rest did not fit, the same command goes on"
    print(f"measured for {spent:.0f} minutes{left}", file=sys.stderr)


def _chosen(arguments: argparse.Namespace) -> list[Measurement]:
    of_formats = arguments.select == "formats"
    found = measurements(
        SELECTIONS[arguments.select],
        everybody=arguments.select in ("full", "formats"),
        contenders=contenders.OF_FORMATS if of_formats else contenders.CONTENDERS,
    )
    return [
        one
        for one in found
        if arguments.only in one.contender.name and arguments.points.search(str(one.point)) and _present(one)
    ]


def _present(measurement: Measurement) -> bool:
    """Return whether kvc-trt itself has the features that this configuration needs; the peers are all there."""
    contender = measurement.contender
    if contender.ours:
        backend = backends().get(contender.options.get("backend", "onnxruntime"))
        if backend is None or not backend.probe().usable:
            return False
    return "native" not in contender.name or native_operators() is not None


if __name__ == "__main__":
    main()
