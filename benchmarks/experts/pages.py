"""The part of an engine's weight file that a model with experts reads: resident bytes after loading and each token.

    python -m benchmarks.experts.pages ENGINE                 # Linux: /proc/self/smaps
    python -m benchmarks.experts.pages ENGINE --tokens 4 --cold
    python -m benchmarks.experts.pages ENGINE --cold --write

The answer is greedy, to a prompt of a few random tokens. A page of the file counts when the process has it in its page
table; pages that the system only keeps in its cache do not, such as those that the check of the file read. Bytes of no
file, the process's own, count apart: copies of weights would be among them, and the peak has those that were freed
again. With `--cold` the file is dropped from the system's cache after it was checked: the disk then returns the pages
asked for, and those that the system reads ahead. Without, the system also maps neighbours of a page that it has in
memory.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from pathlib import Path
from typing import Any

from benchmarks import machine, store
from kvc_trt import Engine
from kvc_trt.models.config import Experts, ModelConfig
from kvc_trt.models.weights import count_parameters
from kvc_trt.profile.profiled_engine import random_prompts

WEIGHTS = "weights.safetensors"
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ ")
MIB = 1 << 20


def resident_bytes(file: str) -> int:
    """Return how many bytes of mappings of a file are in this process's memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if _MAPPING.match(line):
            inside = line.endswith(f"/{file}")
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def own_bytes() -> tuple[int, int]:
    """Return this process's bytes of no file, and the most bytes of any kind that it has had in memory."""
    lines = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
    fields = {name: value for name, _, value in lines}
    return int(fields["RssAnon"].split()[0]) << 10, int(fields["VmHWM"].split()[0]) << 10


def shares(model: ModelConfig, experts: Experts, size: int) -> tuple[float, float]:
    """Return the bytes of experts in a file of `size`, and of the experts of one token, by their parameters."""
    of_one = 3 * model.hidden_size * experts.size
    layers = sum(model.experts(layer) is not None for layer in range(model.num_hidden_layers))
    by_parameter = size / count_parameters(model)
    return layers * experts.count * of_one * by_parameter, layers * experts.chosen * of_one * by_parameter


def dropped(path: Path) -> None:
    """Ask the system to forget the pages of a file that it has in memory."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--prompt-tokens", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--write", action="store_true", help="store the figures in benchmarks/results/")
    arguments = parser.parse_args()
    with Engine.open(arguments.engine, backend="onnxruntime") as engine:
        if engine.model.description.experts is None:
            raise SystemExit(f"error: {arguments.engine} has no experts")
        result = measure(engine, arguments.engine / WEIGHTS, arguments.prompt_tokens, arguments.tokens, arguments.cold)
    if arguments.write:
        print(store.write_result("expert_pages", result))


def measure(engine: Engine, path: Path, prompt_tokens: int, tokens: int, cold: bool) -> dict[str, Any]:
    """Generate `tokens` tokens; return sizes of the file's parts and the resident bytes after each moment."""
    model, size = engine.model, path.stat().st_size
    experts = model.description.experts
    assert experts is not None
    every, chosen = shares(model, experts, size)
    print(f"{size / MIB:,.0f} MiB of weights, {every / MIB:,.0f} of experts; {chosen / MIB:,.0f} in those of a token")
    if cold:
        dropped(path)
    moments: list[dict[str, Any]] = []
    started = time.perf_counter()

    def note(moment: str) -> None:
        nonlocal started
        seconds, mapped, (own, peak) = time.perf_counter() - started, resident_bytes(WEIGHTS), own_bytes()
        found = {"weight_file_bytes": mapped, "own_bytes": own, "peak_bytes": peak, "seconds": seconds}
        moments.append({"moment": moment, **found})
        print(
            f"{moment:>10}: {mapped / MIB:8,.0f} MiB of the file resident, {own / MIB:6,.0f} of no file, "
            f"peak {peak / MIB:8,.0f}; {seconds:6.1f} s",
            flush=True,
        )
        started = time.perf_counter()

    note("opened")
    engine.session()
    note("loaded")
    prompt = random_prompts(1, prompt_tokens, model.vocab_size)[0].tolist()
    for number, _ in enumerate(engine.stream([prompt], max_new_tokens=tokens, ignore_eos=True), 1):
        note(f"token {number}")
    return {
        "model": f"{model.architecture}, {model.num_hidden_layers} layers, {experts.count} experts, "
        f"{experts.chosen} of a token",
        "commit": machine.commit(),
        "prompt_tokens": prompt_tokens,
        "cold": cold,
        "load_average": os.getloadavg()[0],
        "bytes": {"file": size, "experts": every, "experts_of_a_token": chosen},
        "moments": moments,
    }


if __name__ == "__main__":
    main()
