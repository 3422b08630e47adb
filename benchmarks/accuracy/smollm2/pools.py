"""SnapKV's answers to needles by pool and window, one changed at a time, on the same questions."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.accuracy.smollm2.cells import OURS, Answered, Comparison, Group
from benchmarks.accuracy.smollm2.stages import BUDGETS, CORE, POOLS, WIDE_POOL
from benchmarks.page import bullet

_NAMES = {
    "snapkv-gqa": "window 32 and pool 7 (the paper's)",
    WIDE_POOL: "pool 17",
    "snapkv-gqa:pool_kernel=31": "pool 31",
    "snapkv-gqa:pool_kernel=63": "pool 63",
    "snapkv-gqa:window=1": "window 1",
    "snapkv-gqa:window=8": "window 8",
    "snapkv-gqa:window=8:pool_kernel=17": "window 8, pool 17",
    "tova": "`tova`",
}
assert set(POOLS) < set(_NAMES)


def pools(found: Comparison) -> Iterator[str]:
    """Yield the number of needles that each variant answers; nothing where they were not asked."""
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
    full = found.full(group)
    whole = "" if full is None else f", of which the whole cache answers {sum(full.scores[:count]):g}"
    variants = [
        f"{name}: {', '.join(_answered(cells.get((method, budget)), count) for budget in BUDGETS)}"
        for method, name in _NAMES.items()
    ]
    yield bullet(
        f"**SnapKV's pool and window**: of the first {count} questions of {group.short}{whole}, `snapkv-gqa` "
        f"answers, by budget: {'; '.join(variants)}."
    )


def _answered(cell: Answered | None, count: int) -> str:
    return "n/a" if cell is None else f"{sum(cell.scores[:count]):g}"
