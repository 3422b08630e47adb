"""The torch backend's benchmark without a GPU: its cells, what they should cost, and its whole loop in small."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest
import torch

from benchmarks import kernel_cases, torch_backend, torch_baselines, torch_cases, torch_engine
from benchmarks.torch_cases import Cell
from kvc_trt import reference
from kvc_trt.backends.torch.executor import TorchExecutor
from kvc_trt.kernels.ops import kvc
from kvc_trt.kernels.reference_ops import page_major
from kvc_trt.profile.floor import H200
from tests.backends.onnxruntime.conftest import MODEL

CPU = torch.device("cpu")
SMALL = replace(MODEL, num_hidden_layers=2)


def everything():
    options = torch_backend.parse([])
    return list(torch_cases.cells(options.batches, options.contexts, options.budgets, options.baselines, options.dtype))


def test_the_cells_are_those_of_the_requirement():
    found = {(cell.name, cell.batch, cell.context, cell.budget) for cell in everything()}
    places = [(batch, context) for batch in (1, 8, 32) for context in (32768, 131072)]
    sparse = {("rocketkv", *place, budget) for place in places for budget in (256, 512, 1024, 2048)}
    assert found == sparse | {(name, *place, None) for place in places for name in torch_cases.DENSE}


@pytest.mark.parametrize(
    ("batch", "context", "milliseconds"), [(1, 32768, 4.02), (8, 32768, 10.29), (1, 131072, 6.71), (32, 131072, 117.66)]
)
def test_the_floor_of_dense_is_the_floor_models(batch, context, milliseconds):
    """Its figures count the whole context; a cell is 64 tokens short of it."""
    cell = Cell("dense", batch, context, None)
    assert 1e3 * cell.floor_seconds(H200.bandwidth) == pytest.approx(milliseconds, rel=3e-3)


@pytest.mark.parametrize(
    ("batch", "context", "budget", "times"), [(1, 32768, 512, 1.28), (8, 131072, 256, 9.98), (32, 32768, 2048, 6.46)]
)
def test_the_ceiling_is_the_floor_models(batch, context, budget, times):
    """That one takes the budget for what is read; a cell counts what it really reads, some entries more."""
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
    assert refusal.value.code == script.CANNOT == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "no GPU" in err


@pytest.fixture(scope="module")
def weights():
    return torch_backend.random_weights(SMALL, torch.float32, CPU)


def test_the_whole_loop_runs_small_on_a_cpu(weights, capsys):
    """Seconds mean nothing here; that every entry is made, filled and compared does."""
    options = Namespace(
        batches=[2], contexts=[512], budgets=[256], baselines=["sdpa_flash", "flashinfer"], dtype="bfloat16", steps=1,
        until=float("inf"),
    )  # fmt: skip
    dense, sdpa, flashinfer, sparse = torch_backend.decode_part(weights, 1e9, options, SMALL)
    assert [entry["name"] for entry in (dense, sdpa, flashinfer, sparse)] == [*torch_cases.DENSE, "rocketkv"]
    fastest = min(dense["step_ms"], sdpa["step_ms"])
    assert sparse["speedup"] == pytest.approx(fastest / sparse["step_ms"])
    assert dense["tokens_per_second"] == pytest.approx(2e3 / dense["step_ms"])
    assert flashinfer["not_measured"]
    assert dense["state_bytes"] == 2 * 2 * 2 * 2 * 512 * 16 * 2
    assert "x dense of at most" in capsys.readouterr().out


def test_what_there_is_no_time_for_is_listed(weights):
    options = torch_backend.parse(["--batches", "2", "--contexts", "512", "--budgets", "256", "--seconds", "0"])
    for part in (torch_backend.decode_part(weights, 1e9, options, SMALL), torch_backend.prefill_part(weights, options)):
        assert {entry["not_measured"] for entry in part} == {torch_backend.OUT_OF_TIME}


def test_an_engine_is_built_verified_and_reported(tmp_path):
    options = torch_engine.parse(["--levels", "ops", "--steps", "2", "--no-profile"])
    entry = torch_engine.measured(torch_engine.build(tmp_path / "bf16", "bf16", options), options)
    (report,) = entry["verify"]
    assert (entry["weights"], report["passed"], report["engine"]) == ("bf16", True, "bf16")
    assert report["description"]["backend"].startswith("torch ")


def test_what_does_not_fit_is_listed_with_needed_and_free(weights, monkeypatch):
    monkeypatch.setattr(torch_backend, "free_bytes", lambda device: 1 << 20)
    cell = Cell("dense", 32, 4096, None, "bfloat16", SMALL)
    entry = torch_backend.measured(cell, weights, 1e9, 1)
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
    for found, bound in zip(page_major(bounds), expected, strict=True):
        assert torch.equal(found.float()[:, :, :filled], bound[:, :, :filled])


def test_the_flash_baseline_is_our_dense_attention(monkeypatch):
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
