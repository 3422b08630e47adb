"""Measures one point: starts its server, warms it up, lets its tool load it, and watches it meanwhile."""

from __future__ import annotations

import json
import math
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.idle import Others
from benchmarks.serving import aiperf, engines, load, openai_server, perf_analyzer, triton_server
from benchmarks.serving.check_answers import Answered, figures
from benchmarks.serving.engines import Expected, Kind
from benchmarks.serving.load import Asked
from benchmarks.serving.place import Place
from benchmarks.serving.points import Point
from benchmarks.serving.processes import Started
from benchmarks.serving.watch import Watch

_WARM_UP = 8
"""Requests of the warm-up, all at once; their rate says how many requests fill the time."""
_MODEL = openai_server.NAME
_RUNNING = "kvc_trt_running"


@dataclass(frozen=True)
class Prepared:
    """An engine, its questions, and its answers without a server."""

    engine: Path
    row_bytes: int
    asked: Sequence[Asked]
    expected: Sequence[Expected]


@cache
def prepare(kind: Kind, place: Place) -> Prepared:
    """Build an engine and ask it everything once, or take both from the last time."""
    path = engines.build(kind, place)
    engine = engines.open_engine(path)
    asked = load.requests(engine, kind.load)
    row_bytes, expected = engines.expected_answers(engine, asked, place)
    return Prepared(path, row_bytes, asked, expected)


@dataclass(frozen=True)
class Behind:
    """A server that was started: how its tool loads it, one request of the warm-up, and a figure of it."""

    started: Sequence[Started]
    wait_ready: Callable[[], None]
    load: Callable[[int, int], list[Answered]]
    """Given clients and requests."""
    ask: Callable[[Asked], None]
    metric: Callable[[str], float]
    end: Callable[[], None]


def measure(point: Point, place: Place, *, clients: int, seconds: float) -> dict[str, Any]:
    """Return the figures of a point under `clients` clients, with as many requests as fill about `seconds` seconds."""
    prepared = prepare(engines.KINDS[point.kind], place)
    directory = place.work / "points" / point.name
    directory.mkdir(parents=True, exist_ok=True)
    others = Others()
    behind = (_triton if point.server == "triton" else _openai)(point, place, prepared, directory)
    try:
        behind.wait_ready()
        rate = _warm_up(behind, prepared.asked)
        count = max(clients, math.ceil(rate * seconds))
        with Watch(behind.started, lambda: behind.metric(_RUNNING)) as watch:
            answered = behind.load(clients, count)
        found = figures(count, answered, prepared.expected) | watch.figures()
    finally:
        behind.end()
    return found | {
        "server": point.server, "kind": point.kind, "rows": point.rows, "memory_bytes": point.memory_bytes,
        "tool": point.tool, "clients": clients, "row_bytes": prepared.row_bytes, "others_share": others.share(),
    }  # fmt: skip


def _triton(point: Point, place: Place, prepared: Prepared, directory: Path) -> Behind:
    options = ["--rows", str(point.rows)]
    if point.memory_bytes is not None:
        options += ["--memory-bytes", str(point.memory_bytes)]
    repository = directory / "repository"
    triton_server.export(place, prepared.engine, _MODEL, repository, options)
    server = triton_server.TritonServer(place, repository, directory)

    def ask(asked: Asked) -> None:
        url = f"http://127.0.0.1:{server.http}/v2/models/{_MODEL}/generate"
        _post(url, {"input_ids": list(asked.prompt), "max_tokens": asked.max_tokens, "ignore_eos": True})

    def by_tool(clients: int, count: int) -> list[Answered]:
        address = f"127.0.0.1:{server.grpc}"
        return perf_analyzer.load(
            place, address, _MODEL, prepared.asked, clients=clients, count=count, directory=directory
        )

    return Behind(server.started, server.wait_ready, by_tool, ask, server.metric, server.end)


def _openai(point: Point, place: Place, prepared: Prepared, directory: Path) -> Behind:
    server = openai_server.OpenAIServer(place, prepared.engine, directory, point.rows, point.server)

    def ask(asked: Asked) -> None:
        body = {"model": _MODEL, "prompt": list(asked.prompt), "max_tokens": asked.max_tokens, "ignore_eos": True}
        _post(f"{server.url}/v1/completions", body)

    def by_tool(clients: int, count: int) -> list[Answered]:
        return aiperf.load(
            place, server.url, _MODEL, prepared.asked,
            engine=prepared.engine, clients=clients, count=count, directory=directory,
        )  # fmt: skip

    return Behind(server.started, server.wait_ready, by_tool, ask, server.metric, server.end)


def _warm_up(behind: Behind, asked: Sequence[Asked]) -> float:
    """Let a few requests be answered at once, and return how many are answered per second."""
    first = asked[:_WARM_UP]
    began = time.monotonic()
    with ThreadPoolExecutor(len(first)) as pool:
        list(pool.map(behind.ask, first))
    return len(first) / (time.monotonic() - began)


def _post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        answer.read()
