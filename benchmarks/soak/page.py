"""The measured part of the section "An hour under load" in docs/results/reliability.md, from the result file alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.page import DOCS, Marks, measured_by, paragraph, table
from benchmarks.soak.outcomes import BROKEN, BUSY, DIFFERENT, EQUAL, LEFT, LOST, REFUSED, UNEXPLAINED

PAGE = DOCS / "reliability.md"
MARKS = Marks.of("soak/page.py")
_COLUMNS = (EQUAL, DIFFERENT, REFUSED, BUSY, LEFT, BROKEN, UNEXPLAINED, LOST)


def write(data: Mapping[str, Any]) -> None:
    """Write the part into the page."""
    MARKS.replace(PAGE, text(data))


def text(data: Mapping[str, Any]) -> str:
    """Return the part."""
    sections = [_head(data), _requests(data["requests"]), _rows(data), _memory(data["memory"])]
    return "\n\n".join(sections)


def _head(data: Mapping[str, Any]) -> str:
    return paragraph(
        f"{measured_by(data['command'], data['machine'])}; {data['minutes']:g} minutes, seed {data['seed']}, "
        f"{data['clients']} clients, other processes of the machine took up to {data['others_share']:.0%} of it."
    )


def _requests(requests: Mapping[str, Mapping[str, int]]) -> str:
    rows = [[kind, *(f"{counted.get(one, 0):,}" for one in _COLUMNS)] for kind, counted in _by_kind(requests).items()]
    total = sum((Counter(one) for one in requests.values()), Counter[str]())
    rows.append(["**all**", *(f"{total[one]:,}" for one in _COLUMNS)])
    return table(["requests", *_COLUMNS], rows)


def _by_kind(requests: Mapping[str, Mapping[str, int]]) -> dict[str, Counter[str]]:
    """Add up what came whole and what came as a stream."""
    found: dict[str, Counter[str]] = {}
    for kind, counted in requests.items():
        found.setdefault(kind.removesuffix(", stream"), Counter()).update(counted)
    return found


def _rows(data: Mapping[str, Any]) -> str:
    looks, kills = data["checkpoints"], data["kills"]
    left = sum(sum(one["left"].values()) for one in looks)
    open_ = sum(sum(one["without_an_end"].values()) for one in looks)
    fewest = min(rows for one in looks for rows in one["rows_that_answer"].values())
    slowest = max((one["answers_after_seconds"] for one in kills), default=0.0)
    return paragraph(
        f"{len(kills)} processes were killed by SIGKILL (workers and the frontend in turn); each time every engine "
        f"answered again, after {slowest:g} s at most. The server was left in peace {len(looks)} times: {left:g} "
        f"requests were still in a worker, {open_:g} had no end, and {fewest} of {data['rows']} rows answered at once."
    )


def _memory(memory: Mapping[str, Mapping[str, float]]) -> str:
    rows = [
        [
            role, f"{one['mib_per_hour']:+.1f} ({one['low']:+.1f} to {one['high']:+.1f})", f"{one['minutes']}",
            f"{one['first_mib']:.1f}", f"{one['last_mib']:.1f}", f"{one['peak_mib']:.1f}",
        ]
        for role, one in sorted(memory.items())
    ]  # fmt: skip
    heads = ["process", "MiB per hour (95 %)", "minutes fitted", "first MiB", "last MiB", "peak MiB"]
    return table(heads, rows)
