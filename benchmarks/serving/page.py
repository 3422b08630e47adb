"""docs/results/serving.md and its plots, from the result file alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import store
from benchmarks.machine import ROOT
from benchmarks.page import DOCS, versions, written_by
from benchmarks.peers.rounds import BUSY
from benchmarks.serving import plots
from benchmarks.serving.engines import KINDS
from kvc_trt.files.atomic import write_whole

NAME = "serving"
IN_TURNS = "serving_in_turns"
"""The result of points that were measured in turns, several times."""
PAGE = DOCS / "serving.md"
Points = Mapping[str, Mapping[str, Any]]


def write(data: Mapping[str, Any], folder: Path | None = None) -> Path:
    """Write the page to docs/, or with its plots into a folder, and return its path."""
    target = PAGE if folder is None else folder / PAGE.name
    images = ROOT / "docs" / "images" if folder is None else folder
    for name, drawn in pictures(data["points"]).items():
        write_whole(images / name, drawn.encode())
    write_whole(target, text(data, os.path.relpath(images, target.parent), in_turns()).encode())
    return target


def in_turns() -> dict[str, Any] | None:
    """Return the result of the rounds, None where they were not measured."""
    path = store.recorded_path(IN_TURNS)
    return store.read(path) if path.exists() else None


def text(data: Mapping[str, Any], images: str, turns: Mapping[str, Any] | None = None) -> str:
    """Return the page; `images` is where its plots are, as seen from it, and `turns` the result of the rounds."""
    points: Points = {name: one for name, one in data["points"].items() if one["answered"]}
    shown = [f"![{_caption(name)}]({images}/{name})" for name in pictures(data["points"])]
    sections = [
        _head(data), _overview(points), *shown, *_memory(points), *_light(points, turns), *_batching(points),
        *_same_memory(points), *_apart(points), _notes(data),
    ]  # fmt: skip
    return "\n\n".join(section for section in sections if section) + "\n"


def pictures(points: Points) -> dict[str, str]:
    """Return the plots by their files' names; bars are of the model of the last point alone."""
    points = {name: one for name, one in points.items() if one["answered"]}
    if not points:
        return {}
    last = KINDS[list(points.values())[-1]["kind"]].model
    alike = {name: one for name, one in points.items() if KINDS[one["kind"]].model == last}
    memory = {name: one["memory"] for name, one in points.items() if one["memory"]}
    found = {
        "serving-throughput.svg": plots.bars(
            {name: one["answer_tokens_per_second"] for name, one in alike.items()},
            f"{last}: answer tokens per second", "throughput of the points of one model",
        ),
        "serving-first-token.svg": plots.bars(
            {name: one["first_token_seconds"]["p50"] for name, one in alike.items()},
            f"{last}: median seconds to the first token, waiting included", "time to the first token",
        ),
    }  # fmt: skip
    if memory:
        found["serving-memory.svg"] = plots.lines(
            memory, "seconds under load", "resident memory of the server's processes, MiB", "memory over time"
        )
    return found


_SERVERS = {
    "triton": "`perf_analyzer` on tritonserver with an engine that `kvc-trt export triton` wrote",
    "light": "`aiperf` on `kvc-trt serve`",
    "dynamo": "`aiperf` on NVIDIA Dynamo behind our gateway",
    "apart": "`aiperf` on the same with prefill and decode in processes of their own, one thread each",
}
"""The tool and the server of the points whose names begin so."""


def _servers(data: Mapping[str, Any]) -> str:
    found = {name.partition("-")[0] for name in data["points"]}
    return ", ".join(f"{words} (`{name}-*`)" for name, words in _SERVERS.items() if name in found)


def _caption(name: str) -> str:
    return name.removeprefix("serving-").removesuffix(".svg").replace("-", " ")


def _head(data: Mapping[str, Any]) -> str:
    machine = data["machine"]
    clients = sorted({one["clients"] for one in data["points"].values()})
    kinds = "\n".join(_kind(name) for name in dict.fromkeys(one["kind"] for one in data["points"].values()))
    return "\n".join(
        [
            "# Servers under load",
            "",
            written_by("python -m benchmarks.serving"),
            "",
            f"`{data['command']}` at commit {machine['commit']} on {machine['device']}, {machine['time_utc'][:10]}: "
            f"**{machine['usable_cores']} processor cores** for the server and the tool together, so these figures "
            "compare ways to serve on this machine and say nothing about a larger one.",
            versions(machine, data["versions"]),
            "",
            f"Real servers on loopback, loaded by real tools: {_servers(data)}. "
            f"{' or '.join(map(str, clients))} clients send a request each, and the next one once it is answered. "
            "Answers are greedy and end tokens are ignored, so that every point does the same work per request.",
            "",
            kinds,
            "",
            "*First token* is the time from the request to the first piece of its answer, waiting for a row included. "
            "*Per token* is the time of one answer from its first to its last token, over the tokens after the first. "
            "p50 and p99 are over the requests; the result file has p90 and the largest as well. *Gap* is the time "
            "between two pieces that a client sees.",
        ]
    )


def _kind(name: str) -> str:
    kind = KINDS[name]
    budget = "" if kind.token_budget is None else f", token budget {kind.token_budget}"
    prompts, answers = kind.load.prompt_tokens, kind.load.answer_tokens
    return (
        f"- **{name}**: {kind.model} in fp32, policy `{kind.policy}`{budget}; prompts of {prompts[0]:,} to "
        f"{prompts[1]:,} tokens, answers of {answers[0]} to {answers[1]}; {kind.load.distinct} different requests in "
        "turn."
    )


def _overview(points: Points) -> str:
    lines = [
        "## Every point",
        "",
        "| point | engine | rows | ran, s | answered of sent | requests/s | tokens/s | first token p50, p99, s | "
        "per token p50, p99, ms | gap p99, ms |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, one in points.items():
        first, token = one["first_token_seconds"], one["seconds_per_token"]
        gap = f"{1e3 * one['gap_seconds']['p99']:.0f}" if one["gap_seconds"] else "-"
        lines.append(
            f"| {name}{_mark(one)} | {one['kind']} | {_rows(one)} | {one['seconds']:.0f} | "
            f"{one['answered']} of {one['sent']} | {one['requests_per_second']:.2f} | "
            f"{one['answer_tokens_per_second']:.1f} | {first['p50']:.2f}, {first['p99']:.2f} | "
            f"{1e3 * token['p50']:.1f}, {1e3 * token['p99']:.1f} | {gap} |"
        )
    return "\n".join(lines)


def _rows(one: Mapping[str, Any]) -> str:
    return "by memory" if one["memory_bytes"] is not None else str(one["rows"])


def _memory(points: Points) -> Iterable[str]:
    lines = [
        "## Nothing lost, and memory",
        "",
        "An answer is compared with that of `kvc-trt run`. It may differ from a *near-tie* on, where the two best "
        "log-probabilities are less than 0.001 apart: rounding depends on the number of rows. Memory is the sum of the "
        "resident memory of all processes of the server, so shared pages count once for each of them; *early* is its "
        "median in the second fifth of the time, *late* in the last fifth.",
        "",
        "| point | lost | equal | near-tie | different | memory early, MiB | late | peak |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, one in points.items():
        compared = one["compared"]
        lines.append(
            f"| {name} | {one['lost']} | {compared['equal']} | {compared['near_tie']} | {compared['different']} | "
            f"{one['memory_early_mib']:,.0f} | {one['memory_late_mib']:,.0f} | {one['memory_peak_mib']:,.0f} |"
        )
    yield "\n".join(lines)


_LOADS = ("tiny", "batched")
"""The loads under which both the light server and Dynamo are measured."""


def _light(points: Points, turns: Mapping[str, Any] | None) -> Iterable[str]:
    pairs = [(f"light-{load}", f"dynamo-{load}") for load in _LOADS]
    found = [(points[light], points[dynamo]) for light, dynamo in pairs if light in points and dynamo in points]
    if found:
        beside = "; ".join(
            f"{light['kind']}: {_beside(light, dynamo, 'in the light server', 'behind Dynamo')}"
            for light, dynamo in found
        )
        yield f"## The light server and Dynamo\n\nThe same engines and loads: {beside}."
    if turns is not None:
        yield from _rounds(turns)


def _rounds(turns: Mapping[str, Any]) -> Iterable[str]:
    """Yield the ratio of the two servers over the rounds in which they took turns."""
    path, machine, rounds = store.recorded_path(IN_TURNS), turns["machine"], turns["rounds"]
    for load in _LOADS:
        pairs = [(one[f"light-{load}"], one[f"dynamo-{load}"]) for one in rounds if f"light-{load}" in one]
        if not pairs:
            continue
        ratios = [light["answer_tokens_per_second"] / dynamo["answer_tokens_per_second"] for light, dynamo in pairs]
        lost = sum(one["lost"] for pair in pairs for one in pair)
        others = max(one["others_share"] for pair in pairs for one in pair)
        yield (
            f"In turns, {len(pairs)} rounds ([`{path.name}`]({os.path.relpath(path, PAGE.parent)}), "
            f"`{turns['command']}` at commit {machine['commit']} on {machine['device']}): "
            f"{pairs[0][0]['kind']}, **{median(ratios):.2f} times** Dynamo's tokens per second in the median, "
            f"{min(ratios):.2f} to {max(ratios):.2f}; {lost} requests lost, others at most {others:.0%} of the "
            "processor."
        )


def _batching(points: Points) -> Iterable[str]:
    if "dynamo-batched" not in points or "dynamo-one-by-one" not in points:
        return
    many, one = points["dynamo-batched"], points["dynamo-one-by-one"]
    yield (
        "## Continuous batching, and one by one\n\n"
        f"The same engine and load with {many['rows']} rows and with one: "
        + _beside(many, one, "in a batch", "one by one")
        + "."
    )


def _beside(first: Mapping[str, Any], second: Mapping[str, Any], name: str, other: str) -> str:
    """Throughput, first token and time per token of two points, as one sentence's part."""

    def three(one: Mapping[str, Any]) -> tuple[float, float, float]:
        tokens, begin, each = one["answer_tokens_per_second"], one["first_token_seconds"], one["seconds_per_token"]
        return tokens, begin["p50"], 1e3 * each["p50"]

    (a, b, c), (x, y, z) = three(first), three(second)
    return (
        f"{a:.1f} tokens/s {name}, {x:.1f} {other} ({a / x:.2f} times); first token {b:.1f} and {y:.1f} s (medians), "
        f"per token {c:.1f} and {z:.1f} ms"
    )


def _same_memory(points: Points) -> Iterable[str]:
    if "triton-compressed" not in points or "triton-full" not in points:
        return
    compressed, full = points["triton-compressed"], points["triton-full"]
    lines = [
        "## Compressed and full cache in the same memory",
        "",
        f"Rows and the prompt that is being read may take {compressed['memory_bytes'] / 2**20:,.0f} MiB "
        "(`--memory-bytes`), and the scheduler admits as many rows as fit: "
        + _beside(compressed, full, "compressed", "with the full cache")
        + ". The prompt that is being read takes a part of that memory. Where answers end sooner than new prompts are "
        "read, few rows run at once.",
        "",
        "| cache | one row, MiB | rows of that size in it | rows at once, median | most | tokens/s "
        "| whole answer p50, p99, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, one in (("compressed", compressed), ("full", full)):
        whole = one["answer_seconds"]
        lines.append(
            f"| {name} | {one['row_bytes'] / 2**20:.1f} | {one['memory_bytes'] // one['row_bytes']} | "
            f"{one['rows_median']:.0f} | {one['rows_at_once']:.0f} | "
            f"{one['answer_tokens_per_second']:.1f} | {whole['p50']:.1f}, {whole['p99']:.1f} |"
        )
    yield "\n".join(lines)


def _apart(points: Points) -> Iterable[str]:
    names = {
        "dynamo-batched": "one process, compressed",
        "apart-compressed": "apart, compressed",
        "apart-full": "apart, full cache",
    }
    found = {said: points[name] for name, said in names.items() if name in points}
    if len(found) < 2:
        return
    lines = [
        "## Prefill and decode apart",
        "",
        "Prefill sends decode the cache of each prompt, with its last logits. On one machine both processes share the "
        "same cores, so that nothing is gained; the bytes are those that a network would carry.",
        "",
        "| | bytes moved per request, median, MiB | tokens kept per cache, median | tokens/s | first token p50, p99, s "
        "| per token p50, ms |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        first, moved = one["first_token_seconds"], one["kvc"].get("moved_bytes")
        travelled = "-" if moved is None else f"{moved / 2**20:.2f}"
        lines.append(
            f"| {name} | {travelled} | {one['kvc']['kept_tokens_per_cache']:,.0f} | "
            f"{one['answer_tokens_per_second']:.1f} | {first['p50']:.1f}, {first['p99']:.1f} | "
            f"{1e3 * one['seconds_per_token']['p50']:.1f} |"
        )
    yield "\n".join(lines)


def _mark(one: Mapping[str, Any]) -> str:
    return " †" if one["others_share"] > BUSY else ""


def _notes(data: Mapping[str, Any]) -> str:
    lines = []
    if any(_mark(one) for one in data["points"].values()):
        lines.append(f"† Others used more than {BUSY:.0%} of the processor; such figures are unreliable.")
    once = [name for name, one in data["points"].items() if one["sent"] < 2 * one["clients"]]
    if once:
        lines.append(
            f"{', '.join(once)}: the time was too short for two requests of each client, so nearly all came at the "
            "same moment. Times to the first token are those of this burst, and few rows run at its end."
        )
    for name, one in data["points"].items():
        lines += [f"- {name}: {error}" for error in one["errors"]]
    where = os.path.relpath(store.recorded_path(NAME), PAGE.parent)
    lines.append(f"All figures: [`serving.json`]({where}). `make bench-serving` measures again, for longer.")
    return "\n".join(lines)
