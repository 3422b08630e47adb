"""Text of a plan's section on several GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvc_trt.sizes import readable_size
from kvc_trt.tables import text_table


def ranks_text(found: Mapping[str, Any]) -> str:
    """Return memory, what fits and the floor of each GPU."""
    full, compressed, rows = found["full"], found["compressed"], found["rows"]

    def line(name: str, *sizes: float) -> list[str]:
        return [name, *map(readable_size, sizes)]

    memory = [
        line("weights", found["weight_bytes"], found["weight_bytes"]),
        line("rotary tables", found["rotary_bytes"], found["rotary_bytes"]),
        line(f"caches of {rows} rows", rows * full["cache_bytes_per_row"], rows * compressed["cache_bytes_per_row"]),
        line(
            f"prefill of one prompt of {found['prompt_tokens']:,} tokens", full["prefill_bytes"],
            compressed["prefill_bytes"],
        ),
        line(f"or a step of {rows} rows", found["step_bytes"], found["step_bytes"]),
        line("together", full["total_bytes"], compressed["total_bytes"]),
    ]  # fmt: skip
    speed = [
        [entry["accelerator"], entry["batch"], f"{entry['full_floor_ms']:.2f}", f"{entry['compressed_floor_ms']:.2f}"]
        for entry in found["speed"]
    ]
    sums = f"{found['sums_per_step']} sums over the ranks, each of {readable_size(found['sum_bytes_per_row'])} per row"
    return "\n".join(
        [
            f"tensor parallel: {found['shares']}",
            "memory of each GPU (modelled)",
            text_table(["for", "full", "this policy"], memory, right=(1, 2)),
            *map(_fits, found["gpus"]),
            "floor of one step on each GPU (modelled: its bytes over published bandwidth), ms",
            text_table(["GPU", "batch", "full", "this policy"], speed, right=(1, 2, 3)),
            f"a step also takes {sums}, which are not in the floor; all other tables are for one GPU",
        ]
    )


def _fits(gpu: Mapping[str, Any]) -> str:
    left, batch = gpu["fits_by_bytes"], gpu["largest_batch"]
    fits = f"fits, {readable_size(left)} left" if left >= 0 else f"does not fit by {readable_size(-left)}"
    usable = f"{gpu['gpu']} (90% of its memory, {readable_size(gpu['usable_bytes'])})"
    return f"{usable}: {fits}; largest batch {batch['full']} full, {batch['compressed']} compressed"
