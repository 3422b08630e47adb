"""The kernels' benchmarks without a GPU: sizes, bytes, floors, occupancy, launches, and their refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu import timing as gpu_timing
from benchmarks.gpu.device import Bandwidths
from benchmarks.gpu.emulated import EmulatedGpu
from benchmarks.kernels import __main__ as kernels
from benchmarks.kernels import calls as kernel_calls
from benchmarks.kernels import cases as kernel_cases
from benchmarks.kernels import cubin
from benchmarks.kernels import launches as kernel_launches
from benchmarks.kernels import resources as kernel_resources
from benchmarks.kernels.cases import Case
from benchmarks.kernels.launches import Launch
from benchmarks.kernels.occupancy import occupancy, resident_ctas
from benchmarks.kernels.sweep import POINTS
from benchmarks.kernels.traffic import Traffic, call_traffic, kernel_traffic
from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.profile.accelerators import H100, H200
from kvc_trt.profile.traffic import row_traffic
from tests.plugins_cuda.cases import FP8, bounds_of

LAYERS = kernel_cases.MODEL.num_hidden_layers
CASES = [Case(batch, context, budget) for batch in (1, 32) for context in (16384, 131072) for budget in (256, 2048)]
CASES.append(Case(8, 32768, 512, policy=kernel_cases.FP8))
CASES += [Case(8, 32768, 512, policy=policy) for policy in kernel_cases.IN_FORMAT.values()]


# ---- Bytes and floors


@pytest.mark.parametrize("case", CASES)
def test_a_step_moves_what_the_profile_says_and_the_small_tensors(case: Case) -> None:
    """The floor model counts cache and bounds; the rest is query, output, the appended token and the selected slots."""
    cache = (
        row_traffic(kernel_cases.MODEL, case.parameters, 2, case.prompt, kernel_cases.NEW_TOKENS // 2).bytes / LAYERS
    )
    rest = call_traffic("hybrid", case).bytes / case.batch - cache
    assert 0 < rest < 8 * (6 * 128 * 2 + 4 * case.parameters.selected_width) + 2 * 32 * 128 * 2 + 1024


def test_dense_attention_reads_the_whole_cache_once() -> None:
    case = Case(8, 32768, 512)
    cache = 2 * 8 * 8 * (32768 - 64) * 128 * 2
    assert call_traffic("dense", case).bytes == cache + 8 * (2 * 32 * 128 * 2 + 4 * 8 * 128 * 2)
    assert call_traffic("dense", case).flops == 4 * 8 * 32 * (32768 - 64) * 128


def test_a_compaction_reads_the_keys_twice() -> None:
    long, short = Case(1, 32768, 512), Case(1, 256, 2048)
    keys = 8 * long.prompt * 128 * 2
    assert 2 * keys < call_traffic("compact", long).bytes < 2.5 * keys
    assert not short.is_compacted
    assert set(kernel_traffic("compact", short)) == {"gather_cache"}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("operation", kernel_cases.OPERATIONS)
def test_kernels_add_up_to_their_call(operation: str, case: Case) -> None:
    parts = kernel_traffic(operation, case)
    whole = call_traffic(operation, case)
    assert sum(part.flops for part in parts.values()) == whole.flops
    passed_on = 1.35 if case.is_in_format else 1.2  # scores are those of 16 bit, caches are smaller
    assert whole.bytes <= sum(part.bytes for part in parts.values()) < passed_on * whole.bytes + 4096


def test_a_floor_is_the_slower_of_memory_and_arithmetic() -> None:
    assert Traffic(3_350_000, 0).floor_on(H100) == pytest.approx(1.0)
    assert Traffic(1, 989_000_000).floor_on(H200) == pytest.approx(1.0)
    assert Traffic(4_800_000, 2 * 989_000_000).floor_on(H200) == pytest.approx(2.0)


# ---- Occupancy, by NVIDIA's occupancy calculator


@pytest.mark.parametrize(
    ("architecture", "threads", "registers", "shared", "ctas"),
    [
        ("sm_90a", 256, 128, 0, 2),
        ("sm_90a", 256, 129, 0, 1),
        ("sm_90a", 1024, 64, 0, 1),
        ("sm_90a", 1024, 32, 0, 2),
        ("sm_90a", 64, 16, 0, 32),
        ("sm_90a", 128, 32, 100 * 1024, 2),
        ("sm_80", 128, 32, 100 * 1024, 1),
        ("sm_100", 256, 40, 48 * 1024, 4),
    ],
)
def test_resident_ctas_follow_from_threads_registers_and_memory(
    architecture: str, threads: int, registers: int, shared: int, ctas: int
) -> None:
    found = resident_ctas(architecture, threads=threads, registers=registers, shared_bytes=shared)
    assert found == ctas
    share = occupancy(architecture, threads=threads, registers=registers, shared_bytes=shared)
    assert share == pytest.approx(ctas * threads / 2048)


# ---- Resources that the compiler reports

USAGE = """
arch = sm_90a
Resource usage:
 Function _ZN3kvc1kIfEEvNS_1PE:
  REG:40 STACK:8 SHARED:5120 LOCAL:16 CONSTANT[0]:528 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = """
arch = sm_90a
\t\tFunction : _ZN3kvc1kIfEEvNS_1PE
        /*0040*/                   ACQBULK ;                                   /* 0x00 */
        /*0050*/              @!P0 LDG.E.128 R4, desc[UR6][R2.64] ;            /* 0x00 */
        /*0060*/                   LDG.E.LTC128B R0, desc[UR6][R2.64] ;        /* 0x00 */
        /*0070*/              @UP1 LDGSTS.E.BYPASS.128 [R8], desc[UR6][R2.64] ; /* 0x00 */
        /*0080*/                   STL [R1], R4 ;                              /* 0x00 */
        /*0090*/                   STG.E desc[UR6][R2.64], R0 ;                /* 0x00 */
"""
ELF = """
arch = sm_90a
.nv.info._ZN3kvc1kIfEEvNS_1PE
\tAttribute:\tEIATTR_MAX_THREADS
\tFormat:\tEIFMT_SVAL
\tValue:\t0x100 0x1 0x1
"""


def test_the_compilers_figures_are_read_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # A library has the same function twice where two translation units instantiate it.
    dumps = {"-res-usage": USAGE, "-sass": SASS + SASS, "-elf": ELF}
    monkeypatch.setattr(cubin, "_dump", lambda option, _: dumps[option])
    (code,) = cubin.read(Path("library.so"))
    assert (code.name, code.architecture, code.max_threads) == ("k<fp32>", "sm_90a", 256)
    assert (code.registers, code.static_shared, code.stack, code.local) == (40, 4096, 8, 16)
    assert (code.count("LDG"), code.count("LDG", "128"), code.count("STG", "128")) == (2, 1, 0)
    assert (code.count("LDGSTS", "128"), code.spills) == (1, 1)
    texts = {path: path.read_text() for path in (kernel_resources.DOCUMENT, kernel_resources.EMULATED)}
    (problem,) = kernel_resources.problems([code], texts, "0.0")
    assert "k<fp32> (sm_90a) uses local memory" in problem


WAIT = "        /*0040*/                   ACQBULK ;                                   /* 0x00 */\n"
READ_ONLY = SASS.replace("LDG.E.128", "LDG.E.128.CONSTANT")


@pytest.mark.parametrize(
    ("sass", "expected"),
    [
        (SASS, None),
        (SASS.replace(WAIT, ""), "k<fp32> (sm_90a) does not wait for the launch before it"),
        (SASS.replace(WAIT, "") + WAIT, "may access memory before the launch before it is over: LDG.E.128, LDG.E.LTC"),
        (READ_ONLY, "may access memory before the launch before it is over: LDG.E.128.CONSTANT"),
        (READ_ONLY.replace("sm_90a", "sm_80"), None),  # no launch begins early there
    ],
)
def test_code_that_does_not_wait_for_the_launch_before_it_is_reported(
    monkeypatch: pytest.MonkeyPatch, sass: str, expected: str | None
) -> None:
    sass = sass.replace("STL", "STS")
    monkeypatch.setattr(cubin, "_dump", lambda option, _: {"-res-usage": "", "-sass": sass, "-elf": ""}[option])
    found = kernel_resources.problems(cubin.read(Path("library.so")), {}, "0.0")
    assert found == [] if expected is None else expected in found[0]


def test_a_launch_finds_its_instantiation() -> None:
    names = ("scores<bf16, 128>", "scores<bf16, 64>", "scores<fp32, 128>", "select<true>")
    codes = [cubin.KernelCode(name, "sm_90a", registers=n) for n, name in enumerate(names)]
    assert kernel_resources.instantiation(codes, Launch("scores", 1, 1, 0), "sm_90a").name == "scores<bf16, 128>"
    assert kernel_resources.instantiation(codes, Launch("select", 1, 1, 0), "sm_90a").name == "select<true>"
    with pytest.raises(LookupError, match="gather"):
        kernel_resources.instantiation(codes, Launch("gather", 1, 1, 0), "sm_90a")


# ---- Launches and calls, on the emulation


@pytest.mark.parametrize("operation", kernel_cases.OPERATIONS)
def test_every_launch_is_recorded_and_grows_with_the_batch(emulation: KernelLibrary, operation: str) -> None:
    small, large = (kernel_launches.record(emulation, operation, Case(batch, 4096, 256)) for batch in (1, 8))
    assert [launch.kernel for launch in small] == [launch.kernel for launch in large]
    assert set(kernel_traffic(operation, Case(1, 4096, 256))) <= {launch.kernel for launch in small}
    assert all(a.ctas <= b.ctas for a, b in zip(small, large, strict=True))
    assert sum(launch.ctas for launch in small) < sum(launch.ctas for launch in large)


@pytest.mark.parametrize("policy", [kernel_cases.DEFAULT, kernel_cases.FP8])
@pytest.mark.parametrize("name", kernel_calls.KERNELS)
def test_the_timed_calls_are_accepted_and_can_be_repeated(emulation: KernelLibrary, name: str, policy: str) -> None:
    torch.manual_seed(0)
    (call,) = kernel_calls.KERNELS[name](emulation, Case(1, 512, 64, policy=policy), 1)
    first, second = call(), call()
    for a, b in zip(*(r.values() if isinstance(r, dict) else r for r in (first, second)), strict=True):
        assert a is None or torch.equal(a, b)
        assert a is None or not a.is_floating_point() or bool(a.isfinite().all())


@FP8
def test_synthetic_bounds_are_the_references(fp8: bool) -> None:
    keys = torch.randn(2, 3, 23, 16)
    expected = bounds_of(keys, torch.tensor([17, 17]), 4, fp8=fp8)
    assert torch.equal(kernel_calls.page_bounds(keys, 17, 4, fp8=fp8), expected)


# ---- The sweep


def test_the_sweep_measures_each_point_once() -> None:
    options = kernels.parse([])
    points = list(kernels.points(options))
    identities = {tuple(point.identity.items()) for point in points}
    also_dense = [point for point in POINTS if point.policy in kernel_cases.IN_FORMAT.values()]
    assert len(points) == len(identities) == 3 * 4 * (2 * 4 + 3) + len(POINTS) + len(also_dense)


def test_a_single_point_is_a_step_under_its_own_policy(emulation: KernelLibrary) -> None:
    """quest-matched scores the pages of the whole context, and reads as many tokens as its own rule."""
    options = kernels.parse(
        ["--batches", "1", "--contexts", "512", "--budgets", "64", "--points", "quest-matched/1/512/64"]
    )
    *_, single = kernels.points(options)
    assert (single.identity["policy"], single.case.entries) == ("quest-matched", single.case.dense_entries)
    assert single.case.parameters.top_r == kernel_cases.HEAD_SIZE
    (call,) = kernel_calls.hybrid(emulation, single.case, 1)
    assert bool(call()["output"].isfinite().all())


@pytest.mark.parametrize("form", kernel_cases.IN_FORMAT)
def test_a_point_in_a_format_is_a_step_and_dense_attention_over_codes(emulation: KernelLibrary, form: str) -> None:
    """The traffic counts the kernels that run; a 4-bit cache has at most a third of the bytes of a 16-bit one."""
    policy = kernel_cases.IN_FORMAT[form]
    options = kernels.parse(["--operations", "dense", "--baselines", "--points", f"{policy}/1/768/64"])
    *_, step, dense = kernels.points(options)
    assert (step.name, dense.name) == ("hybrid", "dense")
    for point in (step, dense):
        (call,) = kernel_calls.KERNELS[point.name](emulation, point.case, 1)
        launched = [launch.name.decode() for launch in emulation.launches_of(call)]
        assert set(kernel_traffic(point.name, point.case)) == set(launched)
        assert bool(call()["output"].isfinite().all())
        recorded = kernel_launches.record(emulation, point.name, point.case)
        assert [launch.kernel for launch in recorded] == launched
    assert dense.case.pair_bytes < {"int4": 512 / 3, "k8v4": 512 / 2}.get(form, 512 / 1.9)


def test_a_kernel_that_cannot_run_is_a_failure_and_a_baseline_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> list[object]:
        raise RuntimeError("no kernel image\nis available")

    options = kernels.parse([])
    gpu = EmulatedGpu(None)
    ours, baseline = (kernels.Point(name, Case(1, 512, 64)) for name in ("dense", "sdpa_flash"))
    monkeypatch.setitem(kernel_calls.KERNELS, "dense", refused)
    monkeypatch.setitem(kernel_calls.BASELINES, "sdpa_flash", refused)
    assert kernels.measured(baseline, gpu, 1.0, options) == {"not_measured": "RuntimeError: no kernel image"}
    with pytest.raises(RuntimeError):
        kernels.measured(ours, gpu, 1.0, options)


def test_baselines_are_judged_by_dense_attention() -> None:
    judged_by = {point.name: point.operation for point in kernels.points(kernels.parse(["--batches", "1"]))}
    assert judged_by == {name: name for name in kernel_cases.OPERATIONS} | dict.fromkeys(kernels.BASELINES, "dense")


@pytest.mark.parametrize(("operation", "floor"), [("compact", 0.5), ("dense", 0.4)])
def test_figures_of_a_time_follow_from_bytes_and_bandwidth(operation: str, floor: float) -> None:
    """A copy's bandwidth bounds compaction, a read's everything else."""
    point, bandwidths = kernels.Point(operation, Case(1, 512, 64)), Bandwidths(copied=4e12, read=5e12)
    found = kernels.figures(point, Traffic(2_000_000), 2.0, bandwidths)
    assert found["gigabytes_per_second"] == pytest.approx(1000)
    assert found["floor_us"] == pytest.approx(floor)
    assert found["share_of_floor"] == pytest.approx(floor / 2)
    assert found["share_of_bandwidth"] == pytest.approx(floor / 2)


def test_tensors_are_rotated_until_the_cache_is_cold() -> None:
    assert gpu_timing.sets_needed(1 << 20, 50 << 20) == gpu_timing.LARGEST_SETS
    assert gpu_timing.sets_needed(100 << 20, 50 << 20) == 4
    assert gpu_timing.sets_needed(100 << 30, 50 << 20) == 1


def test_a_throttled_sample_is_refused() -> None:
    assert gpu_timing.judge_clocks(None) == "unknown"
    assert gpu_timing.judge_clocks(0x1) == "free"
    assert gpu_timing.judge_clocks(0x4) == "power cap"
    with pytest.raises(gpu_timing.Throttled, match="hardware slowdown, hardware thermal slowdown"):
        gpu_timing.judge_clocks(0x48)


@pytest.mark.parametrize("arguments", [["--batches", "0"], ["--operations", "sparse"], ["--dtype", "float32"]])
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        kernels.main(arguments)
    assert refused.value.code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_times_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        kernels.main([])
    assert refused.value.code == 3
    assert capsys.readouterr().err == "error: no GPU: the kernels were not run and nothing was timed\n"
