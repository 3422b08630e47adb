"""Decode throughput and prefill memory of the torch backend on a GPU: RocketKV against dense, floor and ceiling.

    python -m benchmarks.torch.backend                                  # every cell: about half an hour on an H200
    python -m benchmarks.torch.backend --batches 1 --contexts 32768 --budgets 512
    python -m benchmarks.torch.backend --parts prefill --contexts 32768

Llama-3.1-8B with random weights in bf16, caches filled synthetically. A step is that of a server: tokens up, one CUDA
graph, the sampled tokens down, measured on the host's clock. Dense is our own kernel, and FlashInfer's and PyTorch's
flash kernels in its place; speed-ups are over the fastest of them. Points that do not fit are listed as not measured,
with needed and free memory, and so are those for which `--seconds` left no time. The result goes to
benchmarks/results/torch_backend.json, point by point (gpu/points.py).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import timing as gpu_timing
from benchmarks.gpu.choice import add_argument, chosen
from benchmarks.gpu.device import Gpu
from benchmarks.gpu.points import Point, Results, add_arguments, first_line
from benchmarks.kernels.calls import page_bounds
from benchmarks.kernels.cases import MODEL
from benchmarks.kernels.sweep import POINTS, count, point
from benchmarks.torch import baselines as torch_baselines
from benchmarks.torch.cases import FORMATS, Cell, against_dense, cells, figures
from kvc_trt.backends.torch.benchmark import TimedDecoder
from kvc_trt.backends.torch.decoder_options import DecoderOptions
from kvc_trt.backends.torch.executor import Decoding, TorchExecutor
from kvc_trt.backends.torch.model.elementwise import compiled
from kvc_trt.backends.torch.model.weights import TorchWeights, joined_names
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.kernels.switches import DEVICE_SAMPLING, SWITCHES
from kvc_trt.methods.base.parameters import DEFAULT
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.weights import expected_tensors
from kvc_trt.runtime import Sampling
from kvc_trt.runtime.sampling.sampler import Sampler

BATCHES, CONTEXTS, BUDGETS = (1, 8, 32), (32768, 131072), (256, 512, 1024, 2048)
BASELINES = tuple(torch_baselines.BASELINES)
WARM_UP_STEPS = 5
GROUPS = 10
PREFILLS = 3
OUT_OF_TIME = "the time given by --seconds was over"
NARROW = replace(MODEL, num_hidden_layers=2, hidden_size=256, intermediate_size=512, vocab_size=1000)
"""A small model for emulated kernels; the sizes that kernels see are those of the large model."""


def random_weights(model: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> TorchWeights:
    """Normal matrices that keep the residual stream's size, norms of one; made on the device, nothing is read."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = expected_tensors(model)

    def make(names: list[str]) -> torch.Tensor:
        shape = (sum(shapes[name][0] for name in names), *shapes[names[0]][1:])
        if len(shape) == 1:
            return torch.full(shape, 0.0 if names[0].endswith("bias") else 1.0, dtype=dtype, device=device)
        tensor = torch.empty(shape, dtype=dtype, device=device)
        return tensor.normal_(0.0, 1 / shape[-1] ** 0.5, generator=generator)

    layers: list[Mapping[str, torch.Tensor]] = [
        {name: make([f"model.layers.{index}.{part}" for part in parts]) for name, parts in joined_names(model)}
        for index in range(model.num_hidden_layers)
    ]
    embedding = make(["model.embed_tokens.weight"])
    head = embedding if model.tie_word_embeddings else make(["lm_head.weight"])
    return TorchWeights(layers, embedding, head, make(["model.norm.weight"]))


def fill(executor: TorchExecutor, entries: Sequence[int]) -> None:
    """Random keys and values in every row and layer, and the bounds of their pages."""
    state, rule = executor.state, executor.program.parameters
    for name, buffer in state.items():
        kind, _, layer = name.partition(".")
        if kind != "bounds":
            # Row by row: random numbers for a whole tensor would double it for a moment.
            for row in buffer:
                row[:, : entries[int(layer)]].normal_()
    for name, bounds in state.items():
        kind, _, layer = name.partition(".")
        if kind == "bounds":
            for row, keys in zip(bounds, state[f"k_cache.{layer}"], strict=True):
                made = page_bounds(keys[None], entries[int(layer)], rule.page_size, fp8=rule.fp8_bounds)
                row.copy_(made[0])


def step_seconds(
    executor: TorchExecutor, cell: Cell, steps: int, *, groups: int = GROUPS, warm_up: int = WARM_UP_STEPS
) -> list[float]:
    """Return the seconds per step of each group of steps: greedy, always at the same length, fed the returned
    tokens."""
    positions = np.full(cell.batch, cell.position, np.int64)
    lengths = np.repeat(np.array(cell.entries, np.int64)[:, None], cell.batch, axis=1)
    tokens = np.arange(cell.batch, dtype=np.int64)
    for _ in range(warm_up):
        tokens = np.maximum(executor.decode_greedy(tokens, positions, lengths), 0)
    times = []
    for _ in range(groups):
        started = time.perf_counter()
        for _ in range(steps):
            tokens = np.maximum(executor.decode_greedy(tokens, positions, lengths), 0)
        times.append((time.perf_counter() - started) / steps)
    return times


def drawn_step_seconds(executor: TorchExecutor, cell: Cell, steps: int) -> float:
    """Return the seconds per step whose tokens are drawn by the device, under temperature and top-p."""
    sampling = Sampling(temperature=0.8, top_p=0.95, seed=0)
    rules = [Sampler(sampling).rules(cell.model.vocab_size)] * cell.batch
    positions = np.full(cell.batch, cell.position, np.int64)
    lengths = np.repeat(np.array(cell.entries, np.int64)[:, None], cell.batch, axis=1)
    tokens, times = np.zeros(cell.batch, np.int64), []
    for _ in range(2):  # the first one warms up
        started = time.perf_counter()
        for _ in range(steps):
            executor.decode_drawn(tokens, positions, lengths, rules)
        times.append((time.perf_counter() - started) / steps)
    return times[-1]


def without_each(executor: TorchExecutor, gpu: Gpu, cell: Cell, steps: int) -> dict[str, float]:
    """Milliseconds per step without each feature that a switch turns off; steps are captured anew."""
    found = {}
    for switch in (one for one in SWITCHES if one is not DEVICE_SAMPLING):
        with switch.off(gpu.library):
            executor.forget_steps()
            few = {"groups": 1, "warm_up": 0} if gpu.emulated else {}  # nothing is measured
            found[switch.name] = 1e3 * median(step_seconds(executor, cell, steps, **few))
    executor.forget_steps()
    return found


def open_cell(cell: Cell, weights: TorchWeights) -> TorchExecutor:
    """Return an executor with filled caches. Raises UnsupportedEnvironment where they do not fit."""
    dense = None
    if make := torch_baselines.BASELINES.get(cell.name):
        capacity, dtype = cell.parameters.layer_capacity(0), getattr(torch, cell.dtype)
        dense = make(cell.model, cell.batch, capacity, cell.entries[0] + 1, dtype)
    device, decoding = weights.embedding.device.type, Decoding(dense_attention=dense)
    executor = TorchExecutor(cell.program, weights=weights, device=device, decoding=decoding)
    executor.allocate(cell.batch)
    fill(executor, cell.entries)
    return executor


def measured(
    cell: Cell, weights: TorchWeights, gpu: Gpu, bandwidth: float, steps: int, *, switches: bool
) -> dict[str, Any]:
    """Return an entry's figures, or the reason why there are none."""
    if reason := torch_baselines.unavailable(cell.name, cell.parameters.layer_capacity(0)):
        return {"not_measured": reason}
    free = gpu.free_bytes
    if cell.needed_bytes > free:
        needed = f"needs {cell.needed_bytes >> 20} MiB beside the weights, {free >> 20} MiB are free"
        return {"not_measured": needed, "floor_ms": 1e3 * cell.floor_seconds(bandwidth)}
    try:
        executor = open_cell(cell, weights)
        times = step_seconds(executor, cell, steps)
        clocks = gpu.clocks()
        further = (
            {}
            if cell.name in BASELINES
            else {
                "drawn_step_ms": 1e3 * drawn_step_seconds(executor, cell, steps),
                "step_ms_without": without_each(executor, gpu, cell, steps) if switches else {},
            }
        )
    except UnsupportedEnvironment as error:
        return {"not_measured": error.message}
    except torch.OutOfMemoryError as error:
        return {"not_measured": first_line(error)}
    except gpu_timing.Throttled as error:
        return {"not_measured": f"the GPU was throttled: {error}"}
    except Exception as error:
        # A baseline that this GPU or version lacks is no failure; one of our own kernels is.
        if cell.name not in BASELINES:
            raise
        return {"not_measured": first_line(error)}
    first, _, third = quantiles(times, n=4)
    seconds = median(times)
    graph = executor.capturer.refused
    return gpu.publishable({
        **figures(cell, seconds, bandwidth), "spread": (third - first) / seconds, "clocks": clocks,
        "cuda_graph": graph is None, **({} if graph is None else {"no_graph_because": graph}),
        "state_bytes": executor.state_bytes(), **further,
    })  # fmt: skip


def fastest_dense(entries: Iterable[Mapping[str, Any]], cell: Cell) -> float | None:
    """Return the seconds of the fastest dense step of the cell's batch and context; None where none was measured."""
    place = cell.batch, cell.context
    return min(
        (
            entry["step_ms"] / 1e3
            for entry in entries
            if "step_ms" in entry and entry["budget"] is None and (entry["batch"], entry["context"]) == place
        ),
        default=None,
    )


def decode_point(
    cell: Cell, weights: TorchWeights, gpu: Gpu, bandwidth: float, options: argparse.Namespace,
    before: Iterable[Mapping[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """One cell; a sparse one carries the ceiling, and the speed-up over the fastest dense one among those `before`."""
    if time.monotonic() > options.until:
        return {"not_measured": OUT_OF_TIME}
    found = measured(cell, weights, gpu, bandwidth, options.steps, switches=options.switches)
    if "step_ms" in found and cell.budget is not None:
        found |= against_dense(cell, found["step_ms"] / 1e3, fastest_dense(before, cell))
    return found


def decode_points(
    weights: TorchWeights, gpu: Gpu, bandwidth: float, options: argparse.Namespace, model: ModelConfig,
    before: Iterable[Mapping[str, Any]],
) -> Iterator[Point]:  # fmt: skip
    """Yield every cell in order; `before` are the entries as they grow."""
    lists = options.batches, options.contexts, options.budgets, options.points, options.baselines
    for cell in cells(*lists, options.dtype, model):
        yield cell.identity, partial(decode_point, cell, weights, gpu, bandwidth, options, before)


def prefill_peak(cell: Cell, weights: TorchWeights, gpu: Gpu) -> dict[str, Any]:
    """Time and peak memory of one prompt's prefill: peaks above what lay there before, which is the weights."""
    options = DecoderOptions(getattr(torch, cell.dtype), elementwise=compiled())
    decoder = TimedDecoder(cell.model, cell.parameters, weights, options)
    ids = torch.randint(0, cell.model.vocab_size, (cell.batch, cell.prompt), device=gpu.device)
    lengths = torch.full((cell.batch,), cell.prompt, device=gpu.device)
    decoder.prefill(ids, lengths)  # compiles, loads and tunes
    seconds = []
    for _ in range(PREFILLS):
        gpu.release()
        gpu.synchronize()
        before = gpu.watch_memory()
        decoder.marks.clear()
        started = time.perf_counter()
        decoder.prefill(ids, lengths)
        gpu.synchronize()
        seconds.append(time.perf_counter() - started)
    found = {"prefill_s": median(seconds), "peak_bytes": gpu.peak_bytes() - before}
    if decoder.marks:
        taken = decoder.compaction_seconds()
        found |= {"compaction_s": taken, "compaction_share": taken / seconds[-1]}
    return gpu.publishable(found)


def prefill_point(cell: Cell, weights: TorchWeights, gpu: Gpu, options: argparse.Namespace) -> dict[str, Any]:
    """One prefill, or the reason why there is none."""
    if time.monotonic() > options.until:
        return {"not_measured": OUT_OF_TIME}
    try:
        return prefill_peak(cell, weights, gpu)
    except torch.OutOfMemoryError as error:
        return {"not_measured": first_line(error)}


def prefill_points(weights: TorchWeights, gpu: Gpu, options: argparse.Namespace, model: ModelConfig) -> Iterator[Point]:
    """Prefill that compacts layer by layer, beside one that leaves every layer's whole cache."""
    for context in options.contexts:
        for name, budget in ((DEFAULT, options.prefill_budget), ("dense", None)):
            cell = Cell(name, 1, context, budget, options.dtype, model)
            yield cell.identity, partial(prefill_point, cell, weights, gpu, options)


def line(entry: Mapping[str, Any]) -> str:
    text = (
        f"{entry['step_ms']:.3f} ms (spread {entry['spread']:.1%}), {entry['tokens_per_second']:.0f} tokens/s, "
        f"{entry['share_of_floor']:.0%} of its floor {entry['floor_ms']:.3f} ms"
    )
    if "speedup" in entry:
        text += f", {entry['speedup']:.2f}x dense of at most {entry['ceiling']:.2f}x"
    return text


def prefill_line(entry: Mapping[str, Any]) -> str:
    share = f", compaction {entry['compaction_share']:.1%}" if "compaction_share" in entry else ""
    return f"{entry['prefill_s']:.2f} s, peak {entry['peak_bytes'] / 1e9:.2f} GB above the weights{share}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=count, nargs="+", default=list(BATCHES))
    parser.add_argument("--contexts", type=count, nargs="+", default=list(CONTEXTS), help="prompt and answer together")
    parser.add_argument("--budgets", type=count, nargs="+", default=list(BUDGETS))
    parser.add_argument("--points", type=point, nargs="*", default=list(POINTS), metavar="POLICY/BATCH/CONTEXT/BUDGET",
                        help="decode beside what the lists say")  # fmt: skip
    parser.add_argument("--baselines", nargs="*", choices=BASELINES, default=list(BASELINES))
    parser.add_argument("--parts", nargs="+", choices=["decode", "prefill"], default=["decode", "prefill"])
    parser.add_argument("--prefill-budget", type=count, default=512, help="token budget of the prefill that compacts")
    parser.add_argument("--dtype", choices=list(FORMATS), default="bfloat16")
    parser.add_argument("--steps", type=count, default=20, help=f"decode steps in each of {GROUPS} groups")
    parser.add_argument("--switches", action=argparse.BooleanOptionalAction, default=True,
                        help="also steps without each feature that a switch turns off")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cell after so long")
    parser.add_argument("--output", default="torch_backend", help="benchmarks/results/OUTPUT.json")
    add_argument(parser)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    options.until = time.monotonic() + options.seconds
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    gpu = chosen(options)
    bandwidths = gpu.bandwidths()
    print(gpu.name)
    gpu.release()
    model, dtype = (NARROW, "float32") if gpu.emulated else (MODEL, options.dtype)
    weights = random_weights(model, getattr(torch, dtype), gpu.device)
    head: dict[str, Any] = {
        "device": gpu.record(),
        "model": "two narrow layers with the heads of llama3.1-8b" if gpu.emulated else "llama3.1-8b, random weights",
        "dtype": options.dtype,
        **gpu.publishable(bandwidths.figures()),
    }
    results = Results(options.output, head, gpu, resume=options.resume, seconds=options.point_seconds)
    if "prefill" in options.parts:
        results.measure("prefill", prefill_points(weights, gpu, options, model), prefill_line)
    if "decode" in options.parts:
        entries = results.entries("decode")
        results.measure("decode", decode_points(weights, gpu, bandwidths.read, options, model, entries), line)
    print(results.path)
    return results.status


if __name__ == "__main__":
    sys.exit(main())
