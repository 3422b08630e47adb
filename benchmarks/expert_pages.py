"""How much of an engine's weight file a model with experts reads: resident bytes of the mapped file after each token.

    python -m benchmarks.expert_pages ENGINE                 # Linux: /proc/self/smaps
    python -m benchmarks.expert_pages ENGINE --tokens 4 --cold

The answer is greedy, to a prompt of a few random tokens. A page counts when the process has it in its page table. With
`--cold` the file is dropped from the system's cache after it was checked: the disk then gives back what is asked for,
and what the system reads ahead. Without, the system also maps neighbours of a page that it has in memory.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from pathlib import Path

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
    arguments = parser.parse_args()
    path = arguments.engine / WEIGHTS
    size = path.stat().st_size
    with Engine.open(arguments.engine, backend="onnxruntime") as engine:
        model = engine.model
        experts = model.description.experts
        if experts is None:
            raise SystemExit(f"error: {arguments.engine} has no experts")
        every, chosen = shares(model, experts, size)
        print(
            f"{size / MIB:,.0f} MiB of weights, {every / MIB:,.0f} of experts; {chosen / MIB:,.0f} in those of a token"
        )
        if arguments.cold:
            dropped(path)
        prompt = random_prompts(1, arguments.prompt_tokens, model.vocab_size)[0].tolist()
        before, started = resident_bytes(WEIGHTS), time.perf_counter()
        print(f"{'opened':>10}: {before / MIB:8,.0f} MiB resident")
        for number, _ in enumerate(engine.stream([prompt], max_new_tokens=arguments.tokens, ignore_eos=True), 1):
            found, seconds = resident_bytes(WEIGHTS), time.perf_counter() - started
            print(
                f"{f'token {number}':>10}: {found / MIB:8,.0f} MiB resident, {(found - before) / MIB:+8,.0f}; "
                f"{seconds:6.1f} s",
                flush=True,
            )
            before, started = found, time.perf_counter()


if __name__ == "__main__":
    main()
