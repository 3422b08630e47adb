"""`perf_analyzer`, which Triton's client library brings: its input, its command, and its output.

It sends requests by gRPC streams, as many at once as there are clients, until `--request-count` are answered. Its own
report has the latency of whole requests alone; the times of every piece are in its profile export.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving.check_answers import Answered
from benchmarks.serving.load import Asked
from benchmarks.serving.place import Place

_LIBRARIES = {"libb64-*.so*": "libb64.so.0d", "libcudart-*.so*": "libcudart.so.12"}
"""Libraries that it is linked to, with the names that the server's wheel gives them."""


def input_data(asked: Sequence[Asked]) -> dict[str, Any]:
    """Return the requests as its `--input-data`; shapes have no batch dimension.

    Log-probabilities are asked for since it writes every output that the model declares: for one that a response lacks
    it writes what its memory held, and where that is no number (of this float output alone), an empty file.
    """
    return {
        "data": [
            {
                "input_ids": {"content": list(one.prompt), "shape": [len(one.prompt)]},
                "max_tokens": [one.max_tokens], "ignore_eos": [True], "stream": [True],
                "return_log_probs": [True],
            }
            for one in asked
        ]
    }  # fmt: skip


def load(
    place: Place, address: str, model: str, asked: Sequence[Asked], *, clients: int, count: int, directory: Path
) -> list[Answered]:
    """Send `count` requests from `clients` clients to a gRPC address; return the record of each."""
    data, export = directory / "input.json", directory / "perf_analyzer.json"
    data.write_text(json.dumps(input_data(asked)), encoding="utf-8")
    export.unlink(missing_ok=True)
    variables = place.variables()
    variables["LD_LIBRARY_PATH"] = str(_libraries(place, directory / "libraries"))
    done = subprocess.run(
        [
            str(place.triton / "bin" / "perf_analyzer"), "-m", model, "-u", address, "-i", "grpc",
            "--streaming", "--async", "--concurrency-range", str(clients), "--request-count", str(count),
            "--input-data", str(data), "--profile-export-file", str(export),
        ],
        env=variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    (directory / "perf_analyzer.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode or not export.exists() or not export.stat().st_size:
        raise SystemExit(f"error: perf_analyzer ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return read_export(json.loads(export.read_text(encoding="utf-8")), asked)


def read_export(export: Mapping[str, Any], asked: Sequence[Asked]) -> list[Answered]:
    """Return the requests of a profile export; its times are nanoseconds.

    Of the outputs only the text is read: see `input_data`.
    """
    places = {one.prompt: place for place, one in enumerate(asked)}
    found = []
    for request in export["experiments"][0]["requests"]:
        place = places[tuple(request["request_inputs"]["input_ids"])]
        arrivals = tuple(int(at) / 1e9 for at in request["response_timestamps"])
        text = "".join(str(one.get("text_output", "")) for one in request.get("response_outputs", []))
        began = int(request["timestamp"]) / 1e9
        error = None if arrivals else "no response"
        found.append(Answered(place, began, arrivals, text, asked[place].max_tokens, error))
    return found


def _libraries(place: Place, directory: Path) -> Path:
    """Make a directory of the libraries that it looks for, beside those in the server's wheel."""
    (site,) = (place.triton / "lib").glob("python3.*/site-packages")
    directory.mkdir(parents=True, exist_ok=True)
    for pattern, name in _LIBRARIES.items():
        (library,) = (site / "nvidia_pytriton.libs").glob(pattern)
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to(library)
    return directory
