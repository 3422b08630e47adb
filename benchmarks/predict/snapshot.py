"""The predictions for all cases of the bars, as one record: kernels, calls, bars."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.kernels import launches as kernel_launches
from benchmarks.kernels.cases import FP8, IN_FORMAT, KV_HEADS, OPERATIONS, Case
from benchmarks.kernels.launches import Launch
from benchmarks.kernels.traffic import Traffic, call_traffic, launch_traffic
from benchmarks.predict import compile as compiled_kernels
from benchmarks.predict import hardware, kernel_time
from benchmarks.predict.counts import RowSlots
from benchmarks.predict.executions import LIBRARY, Executed, executed
from benchmarks.predict.hardware import Gpu
from benchmarks.predict.kernel_time import Compiled, Work
from kvc_trt.kernels.c_library import ARCHITECTURES
from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.profile.accelerators import HOPPER

CONTEXT = 32768
BUDGETS = (512, 2048)
BATCHES = (1, 8, 32)
DEVICES = (hardware.ARCHITECTURE, ARCHITECTURES[0])
"""Devices to emulate: the GPU that is predicted, and one that launches few rows as it launches many."""
GPUS = tuple(Gpu(accelerator) for accelerator in HOPPER)
KERNELS = machine.ROOT / "plugins_cuda" / "kernels"
FOLDERS = (KERNELS, machine.ROOT / "plugins_cuda" / "src")
Entry = dict[str, Any]


def cases() -> Iterator[tuple[str, Case]]:
    """Calls of the bars; the bytes that dense attention reads do not depend on the budget. Formats at their own bars
    alone."""
    for budget in BUDGETS:
        for batch in BATCHES:
            yield "hybrid", Case(batch, CONTEXT, budget)
            yield "hybrid", Case(batch, CONTEXT, budget, policy=FP8)
    for batch in BATCHES:
        yield "dense", Case(batch, CONTEXT, BUDGETS[0])
    for budget in BUDGETS:
        for batch in BATCHES:
            yield "compact", Case(batch, CONTEXT, budget)
    for policy in IN_FORMAT.values():
        yield "dense", Case(8, CONTEXT, BUDGETS[0], policy=policy)
        yield "hybrid", Case(BATCHES[-1], CONTEXT, BUDGETS[-1], policy=policy)


def kernels_commit() -> str | None:
    """Return the last commit that changed the kernels or their launchers, with `-dirty` if they differ from it."""
    folders = [str(folder.relative_to(machine.ROOT)) for folder in FOLDERS]
    found = machine.git("log", "-1", "--format=%h", "--abbrev=12", "--", *folders)
    changed = machine.git("status", "--porcelain", "--", *folders)
    return f"{found}-dirty" if found and changed else found


def sources_digest() -> str:
    """Return a digest of the kernels and their launchers; predictions hold for these sources alone."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in FOLDERS for path in folder.iterdir() if path.is_file()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class Predictor:
    """Predicts launches from one build: the kernels by nvcc, and their emulation that counts."""

    def __init__(self, build: Path) -> None:
        self._build = build
        self._kernels = compiled_kernels.kernels(build)
        self._emulation = KernelLibrary(build / LIBRARY)
        self._places = RowSlots(KERNELS)
        self._executed = cache(lambda *call: executed(build, *call))
        self._work = cache(self._work_of)

    def snapshot(self) -> Entry:
        """Everything, as it goes into the result."""
        kernels = [entry for operation, case in cases() for entry in self.kernels(operation, case)]
        return {
            "commit": kernels_commit(),
            "sources": sources_digest(),
            "nvcc": compiled_kernels.compiler_version(),
            "architecture": hardware.ARCHITECTURE,
            "kernels": kernels,
            "calls": [call_entry(operation, case, kernels) for operation, case in cases()],
            "checks": self.checks(),
        }

    def kernels(self, operation: str, case: Case) -> list[Entry]:
        """One entry for each launch of the call."""
        launches = self._launches(operation, case, hardware.ARCHITECTURE)
        return [self._entry(operation, case, launch, self._like(operation, case, launch)) for launch in launches]

    def checks(self) -> list[Entry]:
        """Collective operations: those that the counts predict from the machine code, beside those that the emulation
        ran."""
        found: dict[tuple[str, str, str], Entry] = {}
        one = Case(1, CONTEXT, BUDGETS[0], kv_heads=1)
        in_formats = (("dense", replace(one, policy=policy)) for policy in IN_FORMAT.values())
        for operation, case in (*((operation, one) for operation in OPERATIONS), *in_formats):
            for run in (run for device in DEVICES for run in self._executed(operation, case, device)):
                _, done = self._work(run)
                pairs = {
                    name: [round(getattr(done, name) * run.ctas), getattr(run, name)]
                    for name in ("products", "exchanges", "barriers", "cluster_barriers")
                }
                identity = {"operation": operation, "kernel": run.kernel, "policy": case.policy}
                found.setdefault((operation, run.kernel, case.policy), identity | pairs)
        return list(found.values())

    def _launches(self, operation: str, case: Case, device: str) -> list[Launch]:
        self._emulation.set_device(device)
        return kernel_launches.record(self._emulation, operation, case)

    def _like(self, operation: str, case: Case, launch: Launch) -> Executed:
        """Return an emulated launch whose blocks do the same as those of `launch`, with the fewest heads and rows."""
        for batch, heads in ((1, 1), (1, KV_HEADS), *((batch, KV_HEADS) for batch in BATCHES if batch <= case.batch)):
            fewer = replace(case, batch=batch, kv_heads=heads)
            for device in DEVICES:
                for number, other in enumerate(self._launches(operation, fewer, device)):
                    same_share = other.ctas * case.batch * KV_HEADS == launch.ctas * batch * heads
                    same_block = (other.kernel, other.threads, other.dynamic_shared) == (
                        launch.kernel,
                        launch.threads,
                        launch.dynamic_shared,
                    )
                    if same_share and same_block:
                        return self._executed(operation, fewer, device)[number]
        raise AssertionError("a launch is like itself")

    def _work_of(self, run: Executed) -> tuple[Compiled, Work]:
        compiled = self._kernels.get(run.instantiation)
        if compiled is None:
            same = ", ".join(name for name in self._kernels if name.partition("<")[0] == run.kernel)
            raise SystemExit(f"error: the emulation ran {run.instantiation}; nvcc compiled {same or 'none of it'}")
        return compiled, kernel_time.work(compiled, run, self._places)

    def _entry(self, operation: str, case: Case, launch: Launch, like: Executed) -> Entry:
        compiled, done = self._work(like)
        lies = kernel_time.geometry(compiled, launch.ctas, launch.threads, launch.dynamic_shared)
        moved = launch_traffic(operation, case, launch.kernel)
        edge = hardware.DEPENDENT_EDGE_MICROSECONDS if launch.begins_early else hardware.EDGE_MICROSECONDS
        unit, number = units(operation, launch.kernel, case)
        return {
            "operation": operation,
            "kernel": launch.kernel,
            "instantiation": compiled.name,
            "batch": case.batch,
            "budget": None if operation == "dense" else case.budget,
            "policy": case.policy,
            "registers": compiled.registers,
            "static_shared": compiled.static_shared,
            "dynamic_shared": launch.dynamic_shared,
            "code_bytes": compiled.code.code_bytes,
            "threads": launch.threads,
            "ctas": launch.ctas,
            "ctas_per_multiprocessor": lies.resident,
            "rounds": lies.rounds,
            "instructions_per_cta": round(done.instructions),
            "products_per_cta": round(done.products),
            "unit": unit,
            "instructions_per_unit": round(done.instructions * launch.ctas / number, 2),
            "loops_without_source": list(done.unmatched),
            "gpus": {gpu.name: _times(gpu, done, lies, moved, edge) for gpu in GPUS},
        }


def units(operation: str, kernel: str, case: Case) -> tuple[str, int]:
    """Return the name and number of a kernel's units of work over all heads: pages, tokens, or prompt tokens."""
    heads = case.batch * KV_HEADS
    if operation == "compact":
        return "prompt token", heads * case.prompt
    if operation == "dense":
        return "token", heads * case.dense_entries
    if kernel.startswith("sparse_attention"):
        return "token", heads * case.tokens_read
    return "page", heads * -(-case.entries // case.parameters.page_size)


def _times(gpu: Gpu, done: Work, lies: kernel_time.Geometry, moved: Traffic, edge: float) -> Entry:
    time = kernel_time.time_on(gpu, done, lies, moved.bytes)
    return {
        "floor_us": round(moved.floor_on(gpu.accelerator), 3),
        "execution_us": round(time.execution, 3),
        "memory_us": round(time.memory, 3),
        "predicted_us": round(time.total, 3),
        "edge_us": edge,
        "bound_by": time.bound_by,
    }


def call_entry(operation: str, case: Case, kernels: list[Entry]) -> Entry:
    """Return a whole call: its kernels one after the other, an edge of the graph before each."""
    budget = None if operation == "dense" else case.budget
    identity = {"operation": operation, "batch": case.batch, "budget": budget, "policy": case.policy}
    own = [one for one in kernels if identity.items() <= one.items()]
    gpus = {}
    for gpu in GPUS:
        times = [one["gpus"][gpu.name] for one in own]
        predicted = sum(time["predicted_us"] + time["edge_us"] for time in times)
        floor = call_traffic(operation, case).floor_on(gpu.accelerator)
        gpus[gpu.name] = {
            "floor_us": round(floor, 2),
            "predicted_us": round(predicted, 2),
            "share_of_floor": round(floor / predicted, 3),
        }
    return {**identity, "launches": len(own), "gpus": gpus}
