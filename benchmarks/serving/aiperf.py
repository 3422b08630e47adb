"""`aiperf`: its input, its command, and its output.

The requests go as they are (`inputs-json`), with token ids for prompts. aiperf wants a tokenizer even where the server
counts tokens, and offline it finds one only in the layout of Hugging Face's cache, which is made here.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving.check_answers import Answered
from benchmarks.serving.load import Asked
from benchmarks.serving.place import Place
from kvc_trt.files.atomic import write_whole

_TOKENIZER = "local/tokenizer"
_DONE = "[DONE]"


def input_data(asked: Sequence[Asked], model: str) -> dict[str, Any]:
    """Return the requests as a file of the type `inputs-json`; each is named after its place."""
    return {
        "data": [
            {
                "session_id": str(place),
                "payloads": [
                    {
                        "model": model, "prompt": list(one.prompt), "max_tokens": one.max_tokens, "ignore_eos": True,
                        "stream": True, "stream_options": {"include_usage": True},
                    }
                ],
            }
            for place, one in enumerate(asked)
        ]
    }  # fmt: skip


def load(
    place: Place, url: str, model: str, asked: Sequence[Asked], *, engine: Path, clients: int, count: int,
    directory: Path,
) -> list[Answered]:  # fmt: skip
    """Send `count` requests from `clients` clients to a server of OpenAI's API; return the record of each."""
    data, written = directory / "inputs.json", directory / "aiperf"
    data.write_text(json.dumps(input_data(asked, model)), encoding="utf-8")
    shutil.rmtree(written, ignore_errors=True)
    variables = place.variables()
    variables.pop("PYTHONPATH")
    variables |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HOME": str(_tokenizer(engine, directory))}
    done = subprocess.run(
        [
            str(place.aiperf / "bin" / "aiperf"), "profile", "--model", model, "--url", url,
            "--endpoint-type", "completions", "--streaming", "--tokenizer", _TOKENIZER, "--use-server-token-count",
            "--custom-dataset-type", "inputs-json", "--input-file", str(data),
            "--dataset-sampling-strategy", "sequential",
            "--concurrency", str(clients), "--request-count", str(count), "--export-level", "raw",
            "--artifact-dir", str(written), "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics",
        ],
        env=variables, cwd=directory, capture_output=True, text=True, check=False,
    )  # fmt: skip
    (directory / "aiperf.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    export = written / "profile_export_raw.jsonl"
    if not export.exists():
        raise SystemExit(f"error: aiperf ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    with export.open(encoding="utf-8") as lines:
        return read_export(map(json.loads, lines))


def read_export(records: Iterable[Mapping[str, Any]]) -> list[Answered]:
    """Return the requests of a raw export; its times are nanoseconds."""
    return [_answered(record) for record in records if record["metadata"]["benchmark_phase"] == "profiling"]


def _answered(record: Mapping[str, Any]) -> Answered:
    place, began = int(record["metadata"]["conversation_id"]), record["start_perf_ns"] / 1e9
    arrivals, texts, tokens, ended = [], [], 0, False
    kvc: dict[str, Any] = {}
    for response in record.get("responses") or ():
        for packet in response.get("packets", ()):
            if packet.get("name") != "data" or packet["value"] == _DONE:
                continue
            event = json.loads(packet["value"])
            if "error" in event:
                return Answered(place, began, (), "", 0, str(event["error"]))
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            for choice in event.get("choices", ()):
                arrivals.append(response["perf_ns"] / 1e9)
                texts.append(choice.get("text") or "")
                kvc = choice.get("kvc", kvc)
                ended = ended or choice.get("finish_reason") is not None
    error = record.get("error")
    if error is None and not ended:
        error = "the answer has no end"
    return Answered(place, began, tuple(arrivals), "".join(texts), tokens, None if error is None else str(error), kvc)


def _tokenizer(engine: Path, directory: Path) -> Path:
    """Make a Hugging Face cache that holds the engine's tokenizer alone."""
    home = directory / "hugging-face"
    model = home / "hub" / f"models--{_TOKENIZER.replace('/', '--')}"
    shutil.rmtree(home, ignore_errors=True)
    (model / "refs").mkdir(parents=True)
    shutil.copytree(engine / "tokenizer", model / "snapshots" / "1")
    write_whole(model / "refs" / "main", b"1")
    write_whole(model / "snapshots" / "1" / "config.json", b'{"model_type": "llama"}')
    return home
