"""GPUs by name, and by three figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvc_trt.errors import InputError
from kvc_trt.profile.accelerators import ACCELERATORS, H100, accelerator


def test_every_gpu_has_its_name_its_figures_and_their_source():
    for name, gpu in ACCELERATORS.items():
        assert accelerator(name.upper()) is gpu
        assert gpu.name.lower().replace(" ", "-") == name
        assert gpu.source.startswith("NVIDIA")
        assert 0.5e12 < gpu.bandwidth < 10e12
        assert gpu.flops_fp8 is None or gpu.flops_fp8 == pytest.approx(2 * gpu.flops_16bit, rel=0.02)  # twice as many
        assert gpu.flops_16bit / gpu.bandwidth > 100  # operations per byte: matrix units
    assert len({gpu.name for gpu in ACCELERATORS.values()}) == len(ACCELERATORS)
    assert accelerator("h100") is H100


def test_the_page_has_the_table():
    page = (Path(__file__).resolve().parents[2] / "docs" / "plan.md").read_text()
    rows = []
    for name, gpu in ACCELERATORS.items():
        figures = (
            gpu.bandwidth / 1e12,
            gpu.flops_16bit / 1e12,
            gpu.flops_fp8 and gpu.flops_fp8 / 1e12,
            gpu.memory / 1e9,
        )
        written = ("-" if figure is None else f"{figure:.4g}" for figure in figures)
        rows.append(f"| `{name}` | {' | '.join(written)} | {gpu.source} |")
    assert "\n".join(["|---|---|---|---|---|---|", *rows, ""]) in page


def test_a_gpu_can_be_given_by_its_figures():
    mine = accelerator("My GPU=900 GB/s, 120.5,24")
    assert (mine.name, mine.bandwidth, mine.flops_16bit, mine.memory) == ("My GPU", 9e11, 120.5e12, 24 * 2**30)
    assert (mine.flops_fp8, mine.source) == (None, "given")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h300", "unknown GPU 'h300'; did you mean 'h200'"),
        ("", "unknown GPU ''"),
        ("mine=900,120,24", "expected NAME=bandwidth,TFLOPS,GiB"),
        ("mine=900GB/s,120", "expected NAME=bandwidth,TFLOPS,GiB"),
        ("mine=900GB/s,0,24", "expected NAME=bandwidth,TFLOPS,GiB"),
        ("mine=900GB/s,nan,24", "expected NAME=bandwidth,TFLOPS,GiB"),
        ("mine=900GB/s,1e3,24", "expected NAME=bandwidth,TFLOPS,GiB"),
        ("=900GB/s,120,24", "expected NAME=bandwidth,TFLOPS,GiB"),
    ],
)
def test_unknown_gpus_and_malformed_figures_are_refused(text, message):
    with pytest.raises(InputError, match=message):
        accelerator(text)
