"""docs/results/decode.md, its picture and the README's table agree with the result."""

from __future__ import annotations

import copy
import re

from benchmarks.decode import page as decode_page
from benchmarks.machine import ROOT

RESULT = decode_page.read("decode_onnxruntime")
PREFILL = decode_page.read("prefill_memory")


def test_the_page_and_its_picture_are_what_the_results_say() -> None:
    assert decode_page.PAGE.read_text(encoding="utf-8") == decode_page.page(RESULT, PREFILL)
    assert decode_page.PICTURE.read_text(encoding="utf-8") == decode_page.picture(RESULT)


def test_a_bar_is_called_met_or_missed_by_its_ratio() -> None:
    changed = copy.deepcopy(RESULT)
    row = changed["whole_step"][0]
    shown = {}
    for native, bodies in ((2.0, 2.0), (1.0, 1.0), (2.0, 1.0), (1.0, 2.0)):
        row["ratio_native"], row["ratio"] = native, bodies
        shown[native, bodies] = decode_page.page(changed, PREFILL).split("1.9: ")[1].split(" |")[0]
    assert shown == {
        (2.0, 2.0): "met",
        (1.0, 1.0): "**missed**",
        (2.0, 1.0): "met by native operators, **missed** by bodies",
        (1.0, 2.0): "**missed** by native operators, met by bodies",
    }


def test_the_readme_shows_the_same_steps() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| (\d+) \| (\d+)K \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", readme, re.MULTILINE)
    measured = [
        (
            str(row["batch"]),
            str(row["context"] // 1024),
            f"{row['full_native']['median_ms']:.1f}",
            f"{row['rocketkv_native']['median_ms']:.1f}",
            f"{row['ratio_native']:.1f}",
        )
        for row in RESULT["whole_step"]
    ]
    assert shown == measured
