"""Find the largest token budget of each policy and cache format with which the caches fit a memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvc_trt.errors import InputError
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.profile.accelerators import Accelerator
from kvc_trt.profile.planning.placement import Placement
from kvc_trt.profile.traffic import full_cache_bytes
from kvc_trt.sizes import readable_size


@dataclass(frozen=True)
class Limit:
    """The memory that caches may take, and the number of rows that share it."""

    memory: int | None
    """Bytes of all rows' caches together on each GPU; None: the memory of a GPU less weights and all else."""
    rows: int


@dataclass(frozen=True)
class Sought:
    """A policy and a cache format for which `plan_limit` finds the largest token budget."""

    policy: str
    kv_cache: str
    longest: int
    """Tokens of the longest sequence; with this budget, a step reads the whole cache."""
    has_budget: bool
    """False for the policy that keeps everything."""
    parameters: Callable[[int], PolicyParameters]
    """Return the policy's parameters for a token budget; InputError if it cannot be built with that budget."""
    place: Callable[[PolicyParameters], Placement]
    """Return the placement of the engine with these parameters."""


@dataclass(frozen=True)
class LargestBudget:
    """The largest budget that fits, or the bytes of the smallest engine if none fits."""

    budget: int | None
    """None where no budget fits."""
    needed: float
    """Bytes taken with `budget`; if that is None, those of the smallest engine found."""


def plan_limit(
    local: ModelConfig, sought: Sequence[Sought], limit: Limit, itemsize: int, gpus: Sequence[Accelerator]
) -> dict[str, Any]:
    """Return the largest budgets that fit as plain data: one table for `limit.memory`, or without it one for each GPU.

    `local` is the part of the model that one GPU computes, `itemsize` the bytes of a cache element; bytes are per GPU.

    InputError if the memory does not hold one token of each row, or if nothing fits.
    """

    def on(gpu: Accelerator) -> Callable[[Sought], dict[str, Any]]:
        return lambda one: _entry(
            one, gpu.usable, lambda rule: one.place(rule).sides["compressed"].memory(limit.rows), limit.rows,
            lambda placement: placement.rows_that_fit("compressed", gpu), gpus=[gpu],
        )  # fmt: skip

    def within(memory: int) -> Callable[[Sought], dict[str, Any]]:
        return lambda one: _entry(
            one, memory, lambda rule: limit.rows * one.place(rule).sides["compressed"].row_bytes, limit.rows,
            lambda placement: memory // placement.sides["compressed"].row_bytes, gpus=gpus,
        )  # fmt: skip

    tables: list[dict[str, Any]]
    if limit.memory is None:
        tables = [{"gpu": gpu.name, "memory_bytes": gpu.usable, "budgets": list(map(on(gpu), sought))} for gpu in gpus]
    else:
        _check_holds_a_token(local, {one.kv_cache for one in sought}, itemsize, limit)
        entries = list(map(within(limit.memory), sought))
        tables = [{"gpu": None, "memory_bytes": limit.memory, "budgets": entries}]
    if not any("bytes_per_row" in entry for table in tables for entry in table["budgets"]):
        _refuse(tables, limit)
    return {"rows": limit.rows, "tables": tables}


def _entry(
    one: Sought,
    memory: float,
    needed: Callable[[PolicyParameters], float],
    rows: int,
    rows_that_fit: Callable[[Placement], int],
    *,
    gpus: Sequence[Accelerator],
) -> dict[str, Any]:
    """Return one line of a table: the largest budget with its sizes and times, or the reason that there is none."""
    head = {"policy": one.policy, "kv_cache": one.kv_cache}
    try:
        found = largest_budget(lambda budget: needed(one.parameters(budget)), memory, one.longest)
    except InputError as error:
        return {**head, "not_applicable": error.message}
    if found.budget is None:
        return {**head, "least_needed_bytes": round(found.needed)}
    placement = one.place(one.parameters(found.budget))
    return {
        **head,
        "token_budget": found.budget if one.has_budget else None,
        "compresses": placement.compresses,
        "bytes_per_row": placement.sides["compressed"].row_bytes,
        "rows": rows_that_fit(placement),
        "step_floor_ms": {
            gpu.name: 1e3 * placement.step_seconds("compressed", gpu, rows)
            if placement.fits("compressed", gpu, rows)
            else None
            for gpu in gpus
        },
    }


def largest_budget(needed: Callable[[int], float], memory: float, longest: int) -> LargestBudget:
    """Return the largest budget of at most `longest` tokens that needs at most `memory` bytes.

    `needed` returns the bytes of a budget. It never falls as the budget grows, and raises InputError for budgets that
    are too small for the policy. An InputError at `longest` is raised, at other budgets it means "too small".

    Bytes are nearly linear in the budget, so the next budget tried is where the line through two known ones meets the
    memory; every third try is the middle instead.
    """
    low, low_bytes = 0, None
    high, high_bytes = longest, needed(longest)
    if high_bytes <= memory:
        return LargestBudget(longest, high_bytes)
    tries = 0
    while high - low > 1:
        tries += 1
        middle = (low + high) // 2
        if tries % 3:
            start = low_bytes or 0.0
            middle = low + int((high - low) * max(0.0, memory - start) / (high_bytes - start))
        middle = min(max(middle, low + 1), high - 1)
        try:
            found = needed(middle)
        except InputError:
            low, low_bytes = middle, None
            continue
        if found <= memory:
            low, low_bytes = middle, found
        else:
            high, high_bytes = middle, found
    return LargestBudget(None, high_bytes) if low_bytes is None else LargestBudget(low, low_bytes)


def _check_holds_a_token(local: ModelConfig, formats: set[str], itemsize: int, limit: Limit) -> None:
    token, name = min((full_cache_bytes(local, 1, itemsize, name), name) for name in formats)
    assert limit.memory is not None
    if limit.memory < limit.rows * token:
        raise InputError(
            f"--memory {readable_size(limit.memory)} for --rows {limit.rows}: one token's keys and values take "
            f"{readable_size(token)} of each row (kv-cache {name})",
            hint=f"{readable_size(limit.rows * token * 1000)} hold 1,000 tokens of each row",
        )


def _refuse(tables: Sequence[dict[str, Any]], limit: Limit) -> None:
    """Raise InputError for tables without a fit: it names the engine closest to fitting, or why none can be built."""
    entries = [(table, entry) for table in tables for entry in table["budgets"]]
    short = [(entry["least_needed_bytes"], table, entry) for table, entry in entries if "least_needed_bytes" in entry]
    if not short:
        raise InputError(
            f"no policy can be built with these settings: {entries[0][1]['not_applicable']}", hint="kvc-trt plan --help"
        )
    least, table, entry = min(short, key=lambda one: one[0] - one[1]["memory_bytes"])
    place = table["gpu"] or "--memory"
    rows, take = ("1 row", "takes") if limit.rows == 1 else (f"{limit.rows} rows", "take")
    raise InputError(
        f"nothing fits: {rows} of {entry['policy']} in kv-cache {entry['kv_cache']} {take} at least "
        f"{readable_size(least)}; {place} has {readable_size(table['memory_bytes'])}",
        hint="fewer --rows, a shorter --max-input-len, or more memory",
    )
