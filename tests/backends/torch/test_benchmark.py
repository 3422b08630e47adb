"""The torch backend's benchmark without a GPU: its cells, their modelled costs, and its whole loop in small."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import store
from benchmarks.gpu import choice
from benchmarks.gpu.emulated import EmulatedGpu
from benchmarks.gpu.points import Results
from benchmarks.kernels import cases as kernel_cases
from benchmarks.kernels.sweep import SweepPoint
from benchmarks.torch import backend as torch_backend
from benchmarks.torch import baselines as torch_baselines
from benchmarks.torch import cases as torch_cases
from benchmarks.torch import engine as torch_engine
from benchmarks.torch.cases import Cell
from kvc_trt import reference
from kvc_trt.backends.torch.executor import TorchExecutor
from kvc_trt.kernels.ops import kvc
from kvc_trt.kernels.reference_ops import page_major
from kvc_trt.profile.accelerators import H200
from tests.small_model import SMALL as MODEL

CPU = torch.device("cpu")
SMALL = replace(MODEL, num_hidden_layers=2)


def everything():
    options = torch_backend.parse([])
    lists = options.batches, options.contexts, options.budgets, options.points, options.baselines
    return list(torch_cases.cells(*lists, options.dtype))


def test_the_cells_are_those_of_the_requirement():
    found = [(cell.name, cell.batch, cell.context, cell.budget) for cell in everything()]
    places = [(batch, context) for batch in (1, 8, 32) for context in (32768, 131072)]
    sparse = {("rocketkv", *place, budget) for place in places for budget in (256, 512, 1024, 2048)}
    dense = {(name, *place, None) for place in places for name in torch_cases.DENSE}
    points = {("quest-matched", 1, 32768, 512), *((kernel_cases.FP8, batch, 32768, 512) for batch in (8, 32))}
    in_format = {(name, batch, 32768, 2048) for name in kernel_cases.IN_FORMAT.values() for batch in (8, 32)}
    assert set(found) == sparse | dense | points | in_format
    assert len(found) == len(set(found))


def test_a_single_point_comes_after_the_dense_cells_of_its_place():
    """Dense cells are measured once, also where the lists do not name the place."""
    points = [SweepPoint("quest-matched", 1, 512, 64), SweepPoint("rocketkv", 8, 1024, 96)]
    found = torch_cases.cells([1], [512], [64], [*points, points[0]], ["sdpa_flash"], "bfloat16")
    named = [(cell.name, cell.batch, cell.budget) for cell in found]
    assert named == [
        ("dense", 1, None), ("sdpa_flash", 1, None), ("rocketkv", 1, 64), ("quest-matched", 1, 64),
        ("dense", 8, None), ("sdpa_flash", 8, None), ("rocketkv", 8, 96),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "context", "milliseconds"), [(1, 32768, 4.02), (8, 32768, 10.29), (1, 131072, 6.71), (32, 131072, 117.66)]
)
def test_the_floor_of_dense_is_the_floor_models(batch, context, milliseconds):
    """The floor model counts the whole context; a cell is 64 tokens short of it."""
    cell = Cell("dense", batch, context, None)
    assert 1e3 * cell.floor_seconds(H200.bandwidth) == pytest.approx(milliseconds, rel=3e-3)


@pytest.mark.parametrize(
    ("batch", "context", "budget", "times"), [(1, 32768, 512, 1.28), (8, 131072, 256, 9.98), (32, 32768, 2048, 6.46)]
)
def test_the_ceiling_is_the_floor_models(batch, context, budget, times):
    """The floor model takes the budget for the entries read; a cell counts the entries really read, some more."""
    assert Cell("rocketkv", batch, context, budget).ceiling == pytest.approx(times, rel=0.03)


def test_figures_stand_beside_floor_and_ceiling():
    cell = Cell("rocketkv", 8, 32768, 512)
    floor = cell.floor_seconds(4.8e12)
    found = torch_cases.figures(cell, 2 * floor, 4.8e12)
    assert found["share_of_floor"] == pytest.approx(0.5)
    assert found["tokens_per_second"] == pytest.approx(4 / floor)
    against = torch_cases.against_dense(cell, 1.0, 0.9 * cell.ceiling)
    assert against["share_of_ceiling"] == pytest.approx(0.9)
    assert "speedup" not in torch_cases.against_dense(cell, 1.0, None)


@pytest.mark.parametrize("script", [torch_backend, torch_engine])
def test_without_a_gpu_it_refuses_in_one_line(script, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as refusal:
        script.main([])
    assert refusal.value.code == choice.CANNOT == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "no GPU" in err


@pytest.fixture(scope="module")
def weights():
    return torch_backend.random_weights(SMALL, torch.float32, CPU)


class TimedCpu(EmulatedGpu):
    """Publishes the seconds of this CPU, which mean nothing, for tests of the figures computed from seconds."""

    free_bytes = 1 << 40

    def publishable(self, figures):
        return dict(figures)


CPU_TIMED = TimedCpu(None)


def test_the_whole_loop_runs_small_on_a_cpu(weights, monkeypatch, tmp_path, capsys):
    """Seconds mean nothing here; that every entry is made, filled and compared does."""
    monkeypatch.setattr(store, "EMULATED", tmp_path)
    options = torch_backend.parse(
        [
            "--batches",
            "2",
            "--contexts",
            "512",
            "--budgets",
            "256",
            "--points",
            "quest-matched/2/512/128",
            "--steps",
            "1",
        ]
    )
    results = Results("torch_backend", {}, CPU_TIMED, resume=False, seconds=60)
    entries = results.entries("decode")
    points = torch_backend.decode_points(weights, CPU_TIMED, 1e9, options, SMALL, entries)
    results.measure("decode", points, torch_backend.line)
    dense, sdpa, flashinfer, sparse, quest = entries
    assert [entry["name"] for entry in entries] == [*torch_cases.DENSE, "rocketkv", "quest-matched"]
    fastest = min(dense["step_ms"], sdpa["step_ms"])
    assert sparse["speedup"] == pytest.approx(fastest / sparse["step_ms"])
    assert quest["speedup"] == pytest.approx(fastest / quest["step_ms"])
    assert dense["tokens_per_second"] == pytest.approx(2e3 / dense["step_ms"])
    assert flashinfer["not_measured"]
    assert dense["state_bytes"] == 2 * 2 * 2 * 2 * 512 * 16 * 2
    assert "x dense of at most" in capsys.readouterr().out


@pytest.mark.slow
def test_a_prefill_has_its_time_its_peak_and_the_share_of_compaction(weights, capsys):
    options = torch_backend.parse(["--contexts", "512", "--prefill-budget", "64"])
    (identity, compacted), _ = torch_backend.prefill_points(weights, CPU_TIMED, options, SMALL)
    entry = {**identity, **compacted()}
    assert 0 < entry["compaction_share"] < 1
    assert "compaction" in torch_backend.prefill_line(entry)


def test_points_without_time_are_listed(weights):
    options = torch_backend.parse(["--batches", "2", "--contexts", "512", "--budgets", "256", "--seconds", "0"])
    points = [
        *torch_backend.decode_points(weights, CPU_TIMED, 1e9, options, SMALL, []),
        *torch_backend.prefill_points(weights, CPU_TIMED, options, SMALL),
    ]
    assert {measured()["not_measured"] for _, measured in points} == {torch_backend.OUT_OF_TIME}


@pytest.mark.slow
def test_an_engine_is_built_verified_and_reported(tmp_path):
    """Built at its first point, or beforehand."""
    options = torch_engine.parse(["--weights", "bf16", "--levels", "ops", "--steps", "2", "--no-profile"])
    ((identity, measured),) = torch_engine.points(tmp_path, CPU_TIMED, options)
    entry = {**identity, **measured()}
    assert (entry["weights"], entry["level"], entry["passed"], entry["engine"]) == ("bf16", "ops", True, "bf16")
    assert entry["description"]["backend"].startswith("torch ")
    assert torch_engine.line(entry) == "passed"
    options = torch_engine.parse(["--weights", "bf16", "--levels", "ops", "--no-profile", "--engines", str(tmp_path)])
    ((_, measured),) = torch_engine.points(tmp_path / "none", CPU_TIMED, options)
    assert measured()["passed"]


def test_points_that_do_not_fit_are_listed_with_needed_and_free(weights, monkeypatch):
    monkeypatch.setattr(TimedCpu, "free_bytes", 1 << 20)
    cell = Cell("dense", 32, 4096, None, "bfloat16", SMALL)
    entry = torch_backend.measured(cell, weights, CPU_TIMED, 1e9, 1, switches=False)
    assert entry["not_measured"].startswith("needs ")
    assert entry["not_measured"].endswith("MiB beside the weights, 1 MiB are free")
    assert entry["floor_ms"] > 0


def test_filled_caches_are_what_a_prefill_would_leave(weights):
    """Exactly as many entries as the cell says, and true bounds of their pages."""
    cell = Cell("rocketkv", 2, 512, 64, "bfloat16", SMALL)
    executor = torch_backend.open_cell(cell, weights)
    keys, bounds = executor.state["k_cache.1"], executor.state["bounds.1"]
    entries = cell.entries[1]
    assert bool((keys[:, :, :entries].abs().sum(-1) > 0).all())
    assert not keys[:, :, entries:].any()
    expected = reference.page_bounds(keys.float(), torch.full((2,), entries), cell.parameters.page_size)
    filled = -(-entries // cell.parameters.page_size)
    for found, bound in zip(page_major(bounds, expected[0].shape[2]), expected, strict=True):
        assert torch.equal(found.float()[:, :, :filled], bound[:, :, :filled])


def test_the_flash_baseline_equals_our_dense_attention(monkeypatch):
    batch, entries, capacity, size = 2, 40, 48, 16
    query, new = torch.randn(batch, 4, size), torch.randn(batch, 2, size)
    caches = [torch.randn(batch, 2, capacity, size) for _ in range(2)]
    lengths = torch.full((batch,), entries - 1)
    ours = [cache.clone() for cache in caches]
    attend = torch_baselines.sdpa_flash(SMALL, batch, capacity, entries, torch.float32)
    found = attend(query, new, new, *caches, lengths)
    torch.testing.assert_close(found, kvc.dense_attention(query, new, new, *ours, lengths))
    for cache, other in zip(caches, ours, strict=True):
        assert torch.equal(cache, other)


def test_a_rows_pages_are_its_own_memory():
    cache = torch.arange(2 * 2 * 32 * 4).view(2, 2, 32, 4)
    pages = torch_baselines.as_pages(cache, 2)
    assert pages.shape == (4, 2, 16, 4)
    assert set(pages[2:].flatten().tolist()) == set(cache[1].flatten().tolist())
    assert torch_baselines.unavailable("flashinfer", 17) is not None


def test_random_weights_have_the_models_shapes(weights):
    executor = TorchExecutor(Cell("dense", 1, 512, None, "bfloat16", SMALL).program, weights=weights)
    from kvc_trt.backends.torch import memory

    assert weights.nbytes == memory.weight_bytes(SMALL, 4, own_head=True)
    assert executor.weights is weights
    assert kernel_cases.MODEL.num_hidden_layers == 32
