"""What SnapKV's answers to needles depend on: its pool and its window, one changed at a time, on the same questions."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.accuracy.smollm2.cells import OURS, Comparison, Group
from benchmarks.accuracy.smollm2.stages import BUDGETS, CORE, POOLS, WIDE_POOL
from kvc_trt.accuracy.cell import interval, mean

_NAMES = {
    "snapkv-gqa": "window 32, pool 7 (the paper's)",
    WIDE_POOL: "window 32, pool 17",
    "snapkv-gqa:pool_kernel=31": "window 32, pool 31",
    "snapkv-gqa:pool_kernel=63": "window 32, pool 63",
    "snapkv-gqa:window=1": "window 1, pool 7",
    "snapkv-gqa:window=8": "window 8, pool 7",
    "snapkv-gqa:window=8:pool_kernel=17": "window 8, pool 17",
    "tova": "`tova`: window 1, no pool, one list for all heads",
}
assert set(POOLS) < set(_NAMES)


def pools(found: Comparison) -> Iterator[str]:
    """A table of the variants; nothing where they were not asked."""
    stage = CORE["pools"]
    (asked,) = stage.groups
    group, count = Group(asked.task, asked.mode, asked.length, asked.framing), stage.asked
    cells = {
        (method, budget): cell
        for method in _NAMES
        for budget in BUDGETS
        if (cell := found.cell(OURS, group, method, f"budget {budget}")) is not None and len(cell.scores) >= count
    }
    if not any((method, budget) in cells for method in POOLS for budget in BUDGETS):
        return
    yield "## SnapKV's pool and window"
    full = found.full(group)
    whole = "" if full is None else f" The whole cache answers {sum(full.scores[:count]):g} of them."
    yield (
        f"`snapkv-gqa` with its pool or its window changed, the first {count} questions of {group}: answered, and "
        f"Wilson's 95 % interval in percent.{whole}"
    )
    lines = [
        "| selection | " + " | ".join(f"budget {one}" for one in BUDGETS) + " |",
        "|---" * (1 + len(BUDGETS)) + "|",
    ]
    for method, name in _NAMES.items():
        row = []
        for budget in BUDGETS:
            cell = cells.get((method, budget))
            row.append("n/a" if cell is None else _answered(cell.scores[:count]))
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    yield "\n".join(lines)


def _answered(scores: tuple[float, ...]) -> str:
    low, high = interval(mean(scores).value, len(scores))
    return f"{sum(scores):g} ({100 * low:.0f}-{100 * high:.0f})"
