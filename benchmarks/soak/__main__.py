"""Loads a real server for an hour and counts the outcome of every request.

    make soak                                       # an hour; writes docs/results/reliability.md's part
    python -m benchmarks.soak --minutes 2           # a look whether everything runs
    python -m benchmarks.soak --in-process          # a scheduler alone: conversations, contexts, hostile callers
    python -m benchmarks.soak --page                # the part again from the results

`kvc-trt serve` runs two engines in the environment of `make dynamo-env`. Clients ask questions with one right answer,
leave early, and send nonsense, while workers and the frontend are killed. Exit code 1: something is lost or differs.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from benchmarks import machine, store
from benchmarks.idle import Others
from benchmarks.machine import ROOT
from benchmarks.serving import engines
from benchmarks.serving.place import Place
from benchmarks.soak import catalogue, page
from benchmarks.soak.in_process import soak as soak_scheduler
from benchmarks.soak.outcomes import DIFFERENT, LOST, UNEXPLAINED
from benchmarks.soak.run import Record, Soak
from benchmarks.soak.server import ROWS, Server


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.page:
        page.write(*(store.recorded(name, "make soak") for name in (page.SERVER, page.IN_PROCESS, page.GATEWAY)))
        return
    if arguments.in_process:
        _soak_scheduler(arguments)
        return
    if not (arguments.dynamo / "bin" / "python").exists():
        raise SystemExit(f"error: there is no {arguments.dynamo}: make dynamo-env")
    place = _place(arguments)
    built = {name: engines.build(kind, place) for name, kind in catalogue.ENGINES.items()}
    head = {**_head(arguments), "clients": arguments.clients, "rows": ROWS}
    path = _path(page.SERVER, head, least=30)
    others = Others()

    def write(record: Record) -> None:
        store.write(path, {**head, "others_share": others.share(), **record.document()})

    server = Server(place, built, place.work)
    try:
        soak = Soak(server, arguments.minutes, arguments.seed, arguments.clients, arguments.pause_seconds, write)
        record = soak.run()
    finally:
        code = server.end()
    write(record)  # the time of other processes is known once the server's own time is
    _report(record, code, path)


def _soak_scheduler(arguments: argparse.Namespace) -> None:
    engine = engines.build(catalogue.TURNS, _place(arguments))
    head = _head(arguments)
    others = Others()
    found = soak_scheduler(engine, 60 * arguments.minutes, arguments.seed)
    path = store.write(_path(page.IN_PROCESS, head, least=5), {**head, "others_share": others.share(), **found})
    for one in found["examples"]:
        print(one)
    whole = found["rows_free"] == found["rows"] and found["thread_lives"] and not found["without_an_end"]
    print(f"{path}: {found['wrong']} requests went wrong, {'nothing' if whole else 'something'} is left of the others")
    if found["wrong"] or not whole:
        raise SystemExit(1)


def _place(arguments: argparse.Namespace) -> Place:
    dynamo = arguments.dynamo.absolute()
    return Place(arguments.work.resolve(), dynamo, dynamo, dynamo, arguments.checkpoint)


def _head(arguments: argparse.Namespace) -> dict[str, Any]:
    command = shlex.join(["python", "-m", "benchmarks.soak", *sys.argv[1:]])
    return {"machine": machine.record(), "command": command, "minutes": arguments.minutes, "seed": arguments.seed}


def _path(name: str, head: dict[str, Any], *, least: float) -> Path:
    """Return where a result belongs; that of a short look lies with those of changed code."""
    return store.result_path(name, head["machine"]) if head["minutes"] >= least else store.UNCOMMITTED / f"{name}.json"


def _report(record: Record, code: int, path: Path) -> None:
    document = record.document()
    wrong = record.outcomes.total(DIFFERENT, LOST, UNEXPLAINED)
    leaks = [one for one in document["checkpoints"] if _leaks(one)]
    for one in (*document["examples"], *leaks):
        print(one)
    print(f"{path}: {wrong} requests went wrong, {len(leaks)} looks found a leak, the server ended with {code}")
    if wrong or leaks or code:
        raise SystemExit(1)


def _leaks(look: dict[str, Any]) -> bool:
    full = all(rows == ROWS for rows in look["rows_taken_at_once"].values())
    return bool(any(look["left"].values()) or any(look["without_an_end"].values()) or not full)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    build = ROOT / "build"
    parser.add_argument("--minutes", type=float, default=60, help="of load (default 60)")
    parser.add_argument("--clients", type=int, default=8, help="threads that ask (default 8)")
    parser.add_argument("--pause-seconds", type=float, default=0.2, help="mean pause of a client (default 0.2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="SmolLM2's GGUF file (default: the one that is fetched)")
    parser.add_argument("--work", type=Path, default=build / "bench-soak", help="for engines and logs")
    parser.add_argument("--dynamo", type=Path, default=build / "dynamo", help="environment of make dynamo-env")
    parser.add_argument("--in-process", action="store_true", help="load a scheduler of this process, and no server")
    parser.add_argument("--page", action="store_true", help="load nothing, write the page's part")
    return parser


if __name__ == "__main__":
    main()
