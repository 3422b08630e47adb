"""The measured part of the section "An hour under load" in docs/results/reliability.md, from the result file alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.page import DOCS, Marks, measured_by, paragraph, table
from benchmarks.soak.outcomes import BROKEN, BUSY, DIFFERENT, EQUAL, LEFT, LOST, REFUSED, UNEXPLAINED

PAGE = DOCS / "reliability.md"
SERVER, IN_PROCESS, GATEWAY = "soak", "soak-in-process", "soak-gateway"
"""The names of the results."""
MARKS = Marks.of("soak/page.py")
_MUST_NOT = (DIFFERENT, UNEXPLAINED, LOST)
_LOOKS = 8
_COLUMNS = (EQUAL, DIFFERENT, REFUSED, BUSY, LEFT, BROKEN, UNEXPLAINED, LOST)


def write(server: Mapping[str, Any], in_process: Mapping[str, Any], gateway: Mapping[str, Any]) -> None:
    """Write the part into the page."""
    MARKS.replace(PAGE, text(server, in_process, gateway))


def text(server: Mapping[str, Any], in_process: Mapping[str, Any], gateway: Mapping[str, Any]) -> str:
    """Return the part."""
    sections = [
        "### The server", _head(server, f"{server['clients']} clients"), _requests(server["requests"]), _rows(server),
        _memory(server["memory"]),
        "### A scheduler in a process", _head(in_process, "6 callers"), _requests(in_process["requests"]),
        _left(in_process), _memory(in_process["memory"]),
        "### The gateway alone", _head(gateway, f"{gateway['clients']} clients"), _asked(gateway["requests"]),
        _heap(gateway["looks"]),
    ]  # fmt: skip
    return "\n\n".join(sections)


def _left(data: Mapping[str, Any]) -> str:
    thread = "ran" if data["thread_lives"] else "had ended"
    return paragraph(
        f"At the end the scheduler's thread {thread}, {data['rows_free']} of {data['rows']} rows were free, and "
        f"{data['without_an_end']} requests had no end, after {data['steps']:,} steps, {data['turns']:,} turns and "
        f"{data['slices']:,} slices; {data['accepted_tokens']:,} of {data['drafted_tokens']:,} drafted tokens were "
        "accepted."
    )


def _head(data: Mapping[str, Any], who: str) -> str:
    return paragraph(
        f"{measured_by(data['command'], data['machine'])}; {data['minutes']:g} minutes, seed {data['seed']}, {who}; "
        f"other work took {data['others_share']:.0%} of the machine."
    )


def _requests(requests: Mapping[str, Mapping[str, int]]) -> str:
    total = sum((Counter(one) for one in requests.values()), Counter[str]())
    columns = [one for one in _COLUMNS if total[one] or one in _MUST_NOT]
    counts = {**_by_kind(requests), "**all**": total}
    rows = [[kind, *(f"{counted[one]:,}" for one in columns)] for kind, counted in counts.items()]
    return table(["requests", *columns], rows)


def _by_kind(requests: Mapping[str, Mapping[str, int]]) -> dict[str, Counter[str]]:
    """Add up whole answers and streamed ones."""
    found: dict[str, Counter[str]] = {}
    for kind, counted in requests.items():
        found.setdefault(kind.removesuffix(", stream"), Counter()).update(counted)
    return found


def _rows(data: Mapping[str, Any]) -> str:
    looks, kills = data["checkpoints"], data["kills"]
    left = sum(sum(one["left"].values()) for one in looks)
    open_ = sum(sum(one["without_an_end"].values()) for one in looks)
    fewest = min(rows for one in looks for rows in one["rows_taken_at_once"].values())
    slowest = max((one["answers_after_seconds"] for one in kills), default=0.0)
    return paragraph(
        f"{len(kills)} processes were killed by SIGKILL (workers and the frontend in turn); each time every engine "
        f"answered again, after {slowest:g} s at most. The clients paused {len(looks)} times; then {left:g} requests "
        f"were left in a worker, {open_:g} had no end, and at least {fewest} of {data['rows']} rows could be taken at "
        "once."
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


def _asked(requests: Mapping[str, int]) -> str:
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in requests.items())
    return paragraph(f"Requests to a frontend that answers at once: {kinds}.")


def _heap(looks: Sequence[Mapping[str, float]]) -> str:
    shown = [looks[round(place * (len(looks) - 1) / (_LOOKS - 1))] for place in range(_LOOKS)]
    rows = [
        [f"{one['requests']:,}", *(f"{one[name]:.1f}" for name in ("resident_mib", "in_use_mib", "free_mib"))]
        for one in shown
    ]
    return table(["requests so far", "resident MiB", "of the heap in use, MiB", "of the heap free, MiB"], rows)
