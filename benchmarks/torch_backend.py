"""Decode throughput and prefill memory of the torch backend on a GPU: RocketKV against dense, floor and ceiling.

    python -m benchmarks.torch_backend                                  # every cell: about half an hour on an H200
    python -m benchmarks.torch_backend --batches 1 --contexts 32768 --budgets 512
    python -m benchmarks.torch_backend --parts prefill --contexts 32768

Llama-3.1-8B with random weights in bf16, caches filled synthetically. A step is what a server does: tokens up, one
CUDA graph, the sampled tokens down, measured on the host's clock. Dense is our own kernel, and FlashInfer's and
PyTorch's flash kernels in its place; speed-ups are over the fastest of them. What does not fit is listed as not
measured, with needed and free memory, and so is what `--seconds` left no time for. The result goes to
benchmarks/results/torch_backend.json, anew after every cell: a run that is ended loses the cell it was at.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch

from benchmarks import machine, torch_baselines
from benchmarks.kernel_calls import page_bounds
from benchmarks.kernel_cases import MODEL
from benchmarks.kernels import CANNOT, cuda_library
from benchmarks.torch_cases import FORMATS, Cell, against_dense, cells, figures
from kvc_trt.backends.torch.benchmark import TimedDecoder
from kvc_trt.backends.torch.elementwise import compiled
from kvc_trt.backends.torch.executor import TorchExecutor
from kvc_trt.backends.torch.memory import free_bytes
from kvc_trt.backends.torch.weights import TorchWeights, joined_names
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.weights import expected_tensors

BATCHES, CONTEXTS, BUDGETS = (1, 8, 32), (32768, 131072), (256, 512, 1024, 2048)
BASELINES = tuple(torch_baselines.BASELINES)
WARM_UP_STEPS = 5
GROUPS = 10
PREFILLS = 3
OUT_OF_TIME = "the time given by --seconds was over"
__all__ = ["CANNOT", "main"]


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

    layers = [
        {name: make([f"model.layers.{index}.{part}" for part in parts]) for name, parts in joined_names(model)}
        for index in range(model.num_hidden_layers)
    ]
    embedding = make(["model.embed_tokens.weight"])
    head = embedding if model.tie_word_embeddings else make(["lm_head.weight"])
    return TorchWeights(layers, embedding, head, make(["model.norm.weight"]))


def fill(executor: TorchExecutor, entries: Sequence[int]) -> None:
    """Random keys and values in every row and layer, and the bounds of their pages."""
    state, pages = executor.state, executor.program.parameters.page_size
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
                row.copy_(page_bounds(keys[None], entries[int(layer)], pages)[0])


def step_seconds(executor: TorchExecutor, cell: Cell, steps: int) -> list[float]:
    """Seconds per step of each of GROUPS groups of steps: greedy, always at the same length, fed what came back."""
    positions = np.full(cell.batch, cell.position, np.int64)
    lengths = np.repeat(np.array(cell.entries, np.int64)[:, None], cell.batch, axis=1)
    tokens = np.arange(cell.batch, dtype=np.int64)
    for _ in range(WARM_UP_STEPS):
        tokens = np.maximum(executor.decode_greedy(tokens, positions, lengths), 0)
    times = []
    for _ in range(GROUPS):
        started = time.perf_counter()
        for _ in range(steps):
            tokens = np.maximum(executor.decode_greedy(tokens, positions, lengths), 0)
        times.append((time.perf_counter() - started) / steps)
    return times


def open_cell(cell: Cell, weights: TorchWeights) -> TorchExecutor:
    """An executor with filled caches. Raises UnsupportedEnvironment where they do not fit."""
    dense = None
    if make := torch_baselines.BASELINES.get(cell.name):
        capacity, dtype = cell.parameters.layer_capacity(0), getattr(torch, cell.dtype)
        dense = make(cell.model, cell.batch, capacity, cell.entries[0] + 1, dtype)
    executor = TorchExecutor(cell.program, weights=weights, device=weights.embedding.device.type, dense_attention=dense)
    executor.allocate(cell.batch)
    fill(executor, cell.entries)
    return executor


def measured(cell: Cell, weights: TorchWeights, bandwidth: float, steps: int) -> dict[str, Any]:
    """One entry of the result: figures, or the reason why there are none."""
    from benchmarks import gpu_timing

    entry: dict[str, Any] = {"name": cell.name, "batch": cell.batch, "context": cell.context, "budget": cell.budget}
    if reason := torch_baselines.unavailable(cell.name, cell.parameters.layer_capacity(0)):
        return {**entry, "not_measured": reason}
    free = free_bytes(weights.embedding.device)
    if cell.needed_bytes > free:
        needed = f"needs {cell.needed_bytes >> 20} MiB beside the weights, {free >> 20} MiB are free"
        return {**entry, "not_measured": needed, "floor_ms": 1e3 * cell.floor_seconds(bandwidth)}
    try:
        executor = open_cell(cell, weights)
        times = step_seconds(executor, cell, steps)
        clocks = gpu_timing.judge_clocks(gpu_timing.clock_reasons())
    except UnsupportedEnvironment as error:
        return {**entry, "not_measured": error.message}
    except torch.OutOfMemoryError as error:
        return {**entry, "not_measured": str(error).splitlines()[0]}
    except gpu_timing.Throttled as error:
        return {**entry, "not_measured": f"the GPU was throttled: {error}"}
    except RuntimeError as error:
        # A baseline that this GPU or version lacks must not end the run; a failure of our own must.
        if cell.name not in BASELINES:
            raise
        return {**entry, "not_measured": str(error).splitlines()[0]}
    first, _, third = quantiles(times, n=4)
    seconds = median(times)
    graph = executor.capturer.refused
    return {
        **entry, **figures(cell, seconds, bandwidth), "spread": (third - first) / seconds, "clocks": clocks,
        "cuda_graph": graph is None, **({} if graph is None else {"no_graph_because": graph}),
        "state_bytes": executor.state_bytes(),
    }  # fmt: skip


def decode_part(
    weights: TorchWeights, bandwidth: float, options: argparse.Namespace, model: ModelConfig = MODEL
) -> Iterator[dict[str, Any]]:
    """Every cell in order; RocketKV's carry the ceiling, and the speed-up over the fastest dense one before them."""
    fastest: dict[tuple[int, int], float] = {}
    for cell in cells(options.batches, options.contexts, options.budgets, options.baselines, options.dtype, model):
        if time.monotonic() > options.until:
            entry: dict[str, Any] = {
                "name": cell.name, "batch": cell.batch, "context": cell.context, "budget": cell.budget,
                "not_measured": OUT_OF_TIME,
            }  # fmt: skip
        else:
            entry = measured(cell, weights, bandwidth, options.steps)
            release()
        place = cell.batch, cell.context
        if "step_ms" in entry and cell.budget is None:
            fastest[place] = min(fastest.get(place, float("inf")), entry["step_ms"] / 1e3)
        elif "step_ms" in entry:
            entry |= against_dense(cell, entry["step_ms"] / 1e3, fastest.get(place))
        print(f"{cell.label}: {line(entry)}", flush=True)
        yield entry


def prefill_peak(cell: Cell, weights: TorchWeights) -> dict[str, Any]:
    """Time and peak memory of one prompt's prefill: peaks above what lay there before, which is the weights."""
    dtype = getattr(torch, cell.dtype)
    decoder = TimedDecoder(cell.model, cell.parameters, weights, cache_dtype=dtype, elementwise=compiled())
    ids = torch.randint(0, cell.model.vocab_size, (cell.batch, cell.prompt), device="cuda")
    lengths = torch.full((cell.batch,), cell.prompt, device="cuda")
    decoder.prefill(ids, lengths)  # compiles, loads and tunes
    seconds = []
    for _ in range(PREFILLS):
        release()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        decoder.marks.clear()
        started = time.perf_counter()
        decoder.prefill(ids, lengths)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    found = {"prefill_s": median(seconds), "peak_bytes": torch.cuda.max_memory_allocated() - before}
    if decoder.marks:
        taken = decoder.compaction_seconds()
        found |= {"compaction_s": taken, "compaction_share": taken / seconds[-1]}
    return found


def prefill_part(weights: TorchWeights, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Prefill that compacts layer by layer, beside one that leaves every layer's whole cache."""
    for context in options.contexts:
        for name, budget in (("rocketkv", 512), ("dense", None)):
            cell = Cell(name, 1, context, budget, options.dtype)
            entry: dict[str, Any] = {"name": name, "batch": 1, "context": context, "budget": budget}
            try:
                if time.monotonic() > options.until:
                    entry["not_measured"] = OUT_OF_TIME
                else:
                    entry |= prefill_peak(cell, weights)
            except torch.OutOfMemoryError as error:
                entry["not_measured"] = str(error).splitlines()[0]
                release()
            print(f"prefill {cell.label}: {prefill_line(entry)}", flush=True)
            yield entry


def release() -> None:
    """Give freed memory back, so that the next cell sees what is really free."""
    gc.collect()
    torch.cuda.empty_cache()


def line(entry: dict[str, Any]) -> str:
    if "not_measured" in entry:
        return f"not measured: {entry['not_measured']}"
    text = (
        f"{entry['step_ms']:.3f} ms (spread {entry['spread']:.1%}), {entry['tokens_per_second']:.0f} tokens/s, "
        f"{entry['share_of_floor']:.0%} of its floor {entry['floor_ms']:.3f} ms"
    )
    if "speedup" in entry:
        text += f", {entry['speedup']:.2f}x dense of at most {entry['ceiling']:.2f}x"
    return text


def prefill_line(entry: dict[str, Any]) -> str:
    if "not_measured" in entry:
        return f"not measured: {entry['not_measured']}"
    share = f", compaction {entry['compaction_share']:.1%}" if "compaction_share" in entry else ""
    return f"{entry['prefill_s']:.2f} s, peak {entry['peak_bytes'] / 1e9:.2f} GB above the weights{share}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=count, nargs="+", default=list(BATCHES))
    parser.add_argument("--contexts", type=count, nargs="+", default=list(CONTEXTS), help="prompt and answer together")
    parser.add_argument("--budgets", type=count, nargs="+", default=list(BUDGETS))
    parser.add_argument("--baselines", nargs="*", choices=BASELINES, default=list(BASELINES))
    parser.add_argument("--parts", nargs="+", choices=["decode", "prefill"], default=["decode", "prefill"])
    parser.add_argument("--dtype", choices=list(FORMATS), default="bfloat16")
    parser.add_argument("--steps", type=count, default=20, help=f"decode steps in each of {GROUPS} groups")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cell after so long")
    parser.add_argument("--output", default="torch_backend", help="benchmarks/results/OUTPUT.json")
    options = parser.parse_args(arguments)
    options.until = time.monotonic() + options.seconds
    return options


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    cuda_library()
    from benchmarks import gpu_timing

    bandwidth = gpu_timing.copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copies {bandwidth / 1e9:.0f} GB/s")
    release()
    weights = random_weights(MODEL, getattr(torch, options.dtype), torch.device("cuda", torch.cuda.current_device()))
    result: dict[str, Any] = {
        "device": gpu_timing.device_record(),
        "model": "llama3.1-8b, random weights",
        "dtype": options.dtype,
        "copy_bytes_per_second": bandwidth,
    }
    parts = {"prefill": prefill_part(weights, options), "decode": decode_part(weights, bandwidth, options)}
    for name in (name for name in parts if name in options.parts):
        result[name] = []
        for entry in parts[name]:
            result[name].append(entry)
            path = machine.write_result(options.output, result)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
