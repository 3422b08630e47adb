"""One measurement in a process of its own: load, warm up, answer, and print the figures as one line of JSON.

    python -m benchmarks.peers.worker < REQUEST.json

Runs in kvc-trt's environment or in the peers'; the runner that the request names is the only import that differs.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

WARM_UP_TOKENS = 256
LEAST_TOKEN_ID = 3


def main() -> None:
    request = json.loads(sys.stdin.read())
    print(json.dumps(measure(request)))


def measure(request: dict[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()
    model = importlib.import_module(f"benchmarks.peers.runners.{request['runner']}").Model(request)
    loaded = time.perf_counter()
    model.answer(prompts(request, WARM_UP_TOKENS, seed=1), 4)
    answer = model.answer(prompts(request, request["context"], seed=0), request["new_tokens"])
    return {
        "load_seconds": loaded - started,
        "first_token_seconds": answer.first_token_seconds,
        "token_ms": [round(1e3 * seconds, 3) for seconds in answer.token_seconds],
        "peak_resident_bytes": peak_resident_bytes(),
        "versions": model.versions,
    }


def prompts(request: dict[str, Any], length: int, seed: int) -> list[list[int]]:
    """Random token ids, the same for every engine."""
    draw = random.Random(seed)
    return [
        [draw.randrange(LEAST_TOKEN_ID, request["vocab_size"]) for _ in range(length)] for _ in range(request["batch"])
    ]


def peak_resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise SystemExit("error: no VmHWM in /proc/self/status; this measurement needs Linux")


if __name__ == "__main__":
    main()
