"""Every row of the normative budget table, both splits, and the traffic each of them costs."""

from __future__ import annotations

import pytest

from kvc_trt.methods.base.rocketkv_budget import traffic
from kvc_trt.models.presets import load_preset
from kvc_trt.policies import PolicyParameters, resolve

MODEL = load_preset("llama3.1-8b").config

TABLE = """
| 1024 | 256 | 128 | 128 | 0.320 | 657, 529, 2, 99, 255.0 | 512, 384, 2, 128, 256.0 |
| 4096 | 256 | 128 | 128 | 0.440 | 1209, 1081, 3, 81, 255.5 | 1024, 896, 2, 64, 256.0 |
| 4096 | 1024 | 128 | 512 | 0.320 | 2628, 2500, 2, 99, 1020.1 | 2048, 1920, 2, 128, 1024.0 |
| 16000 | 256 | 128 | 128 | 0.558 | 1592, 1464, 3, 61, 254.4 | 2023, 1895, 3, 48, 254.4 |
| 16384 | 256 | 128 | 128 | 0.560 | 1595, 1467, 3, 61, 254.7 | 2048, 1920, 3, 48, 256.0 |
| 16384 | 512 | 128 | 256 | 0.500 | 2896, 2768, 3, 67, 508.6 | 2896, 2768, 3, 67, 508.6 |
| 32768 | 256 | 128 | 128 | 0.620 | 1618, 1490, 3, 60, 254.4 | 2896, 2768, 4, 45, 255.3 |
| 32768 | 512 | 128 | 256 | 0.560 | 3191, 3063, 3, 61, 509.5 | 4096, 3968, 3, 48, 512.0 |
| 96000 | 256 | 128 | 128 | 0.713 | 1402, 1274, 3, 70, 255.8 | 4957, 4829, 5, 33, 255.8 |
| 131072 | 512 | 128 | 256 | 0.680 | 3019, 2891, 3, 65, 511.5 | 8192, 8064, 4, 32, 512.0 |
| 131072 | 4096 | 128 | 2048 | 0.500 | 23170, 23042, 3, 67, 4069.3 | 23170, 23042, 3, 67, 4069.3 |
| 32768 | 512 | 512 | 256 | 0.560 | 3191, 2679, 3, 61, 509.5 | 4096, 3584, 3, 48, 512.0 |
| 2048 | 256 | 512 | 128 | 0.380 | 1024, 512, 2, 64, 256.0 | 1024, 512, 2, 64, 256.0 |
| 600 | 512 | 512 | 256 | 0.214 | 600, 88, 1, 109, 511.5 | 600, 88, 1, 109, 511.5 |
| 1024 | 1024 | 128 | 512 | 0.200 | 1024, 896, 1, 128, 1024.0 | 1024, 896, 1, 128, 1024.0 |
"""
ROWS = [[cell.strip() for cell in line.strip("| ").split("|")] for line in TABLE.strip().splitlines()]


def resolved(policy: str, sequence: int, budget: int, new: int, **more: object) -> PolicyParameters:
    """Every prompt kept to the budget of the longest one: a row is about one sequence."""
    if policy.startswith("rocketkv"):
        more = {"by_length": False, **more}
    return resolve(policy, model=MODEL, token_budget=budget, max_input_len=sequence - new, max_output_len=new, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("split", ["adaptive", "even"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row[:3]))
def test_rocketkv_matches_the_golden_table(row: list[str], split: str) -> None:
    sequence, budget, new, top_k = (int(cell) for cell in row[:4])
    capacity, prompt_budget, page_size, top_r, pairs = row[5 if split == "adaptive" else 6].split(", ")
    found = resolved("rocketkv", sequence, budget, new, split=split)
    assert [found.capacity, found.prompt_budget, found.page_size, found.top_r, found.top_k] == [
        int(capacity), int(prompt_budget), int(page_size), int(top_r), top_k
    ]  # fmt: skip
    assert round(traffic(found.capacity, found.page_size, found.top_r, found.top_k, 128), 1) == float(pairs)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row[:3]))
def test_presets_differ_from_rocketkv_in_split_and_kernel_only(row: list[str]) -> None:
    sequence, budget, new = (int(cell) for cell in row[:3])
    for preset, split in (("rocketkv-v1", "even"), ("rocketkv-v2", "adaptive")):
        left, right = resolved(preset, sequence, budget, new), resolved("rocketkv", sequence, budget, new, split=split)
        assert left.policy == preset
        assert left.split == split
        assert (left.capacity, left.page_size, left.top_r, left.top_k) == (
            right.capacity, right.page_size, right.top_r, right.top_k
        )  # fmt: skip


HYBRID = {
    32768: [(12, 12), (8, 16), (6, 24), (4, 32), (3, 48)],
    131072: [(23, 5), (16, 8), (12, 12), (8, 16), (6, 24)],
}


@pytest.mark.parametrize("sequence", HYBRID)
def test_hybrid_alone_matches_the_golden_pages_and_channels(sequence: int) -> None:
    found = [resolved("hybrid", sequence, budget, 128) for budget in (256, 512, 1024, 2048, 4096)]
    assert [(one.page_size, one.top_r) for one in found] == HYBRID[sequence]
    assert {one.capacity for one in found} == {sequence}
