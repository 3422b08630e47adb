"""The files that contenders load, each made once from the shared checkpoint and kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.peers.contenders import OURS, TOKEN_BUDGET
from benchmarks.peers.points import Measurement
from benchmarks.peers.shapes import Shape, write_checkpoint
from kvc_trt.models.cache_formats import AUTO

_GGUF_FORMAT = {"fp32": "F32", "int8": "Q8_0", "int4": "Q4_0"}
_OPENVINO_INT4 = ("--group-size", "128", "--ratio", "1.0", "--sym")
_OUTPUT_TOKENS = 128


@dataclass(frozen=True)
class Workplace:
    """The folder of the artefacts, and the Python that runs the peers."""

    directory: Path
    peers_python: Path
    threads: int
    commit: str
    """The commit of kvc-trt; engines are built anew for every commit."""

    def checkpoint(self, shape: Shape) -> Path:
        return self.directory / shape.name

    def python(self, *, ours: bool) -> str:
        return sys.executable if ours else str(self.peers_python)

    def environment(self) -> dict[str, str]:
        """Return the environment of every process: no look-ups over the network, no telemetry."""
        quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
        return {**os.environ, **quiet, "OMP_NUM_THREADS": str(self.threads), "PYTHONPATH": str(ROOT)}


def artefact(measurement: Measurement, place: Workplace) -> Path:
    """Return the files that the contender loads at this point; it may not exist yet."""
    point, contender = measurement.point, measurement.contender
    shape, weights, folder = point.shape.name, point.weights, place.directory
    if contender.runner == OURS:
        form = "" if contender.cache == AUTO else f"-{contender.cache}-cache"
        return folder / "engines" / place.commit / f"{shape}-{weights}-{contender.policy}-{point.context}{form}"
    if contender.runner == "openvino_genai":
        return folder / f"openvino-{shape}-{weights}"
    if contender.runner == "onnxruntime_genai":
        return folder / f"genai-{shape}-{weights}"
    if contender.runner == "llama_cpp":
        return folder / f"{shape}-{_GGUF_FORMAT[weights]}.gguf"
    return place.checkpoint(point.shape)


def make(measurement: Measurement, place: Workplace) -> Path:
    """Make the checkpoint and the artefact where they are missing. Raises SystemExit with the failed command's end."""
    checkpoint, target = place.checkpoint(measurement.point.shape), artefact(measurement, place)
    if not (checkpoint / "model.safetensors").exists():
        print(f"writing {checkpoint}", file=sys.stderr, flush=True)
        write_checkpoint(measurement.point.shape, checkpoint)
    if not target.exists():
        print(f"making {target}", file=sys.stderr, flush=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"unfinished-{target.name}")
        _run(_command(measurement, checkpoint, unfinished, place), place)
        unfinished.rename(target)
    return target


def _command(measurement: Measurement, checkpoint: Path, target: Path, place: Workplace) -> Sequence[str]:
    point, contender = measurement.point, measurement.contender
    python = place.python(ours=contender.ours)
    if contender.runner == OURS:
        return [
            python, "-m", "kvc_trt", "build", "--model", str(checkpoint), "--weights", point.weights,
            "--policy", str(contender.policy), "--token-budget", str(TOKEN_BUDGET), "--backend", "onnxruntime",
            "--kv-cache", contender.cache,
            "--max-input-len", str(point.context), "--max-output-len", str(_OUTPUT_TOKENS), "--no-verify",
            "--force", "-o", str(target),
        ]  # fmt: skip
    if contender.runner == "openvino_genai":
        export = [str(Path(python).with_name("optimum-cli")), "export", "openvino", "--model", str(checkpoint)]
        given = ["--task", "text-generation-with-past", "--weight-format", point.weights, "--disable-convert-tokenizer"]
        return [*export, *given, *(_OPENVINO_INT4 if point.weights == "int4" else ()), str(target)]
    if contender.runner == "onnxruntime_genai":
        builder = [python, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint), "-o", str(target)]
        return [*builder, "-p", point.weights, "-e", "cpu", "-c", str(place.directory / "cache"),
                "--extra_options", "int4_accuracy_level=4", "int4_block_size=32"]  # fmt: skip
    module = "benchmarks.peers.converters.llama_cpp"
    return [python, "-m", module, str(checkpoint), str(target), _GGUF_FORMAT[point.weights]]


def _run(command: Sequence[str], place: Workplace) -> None:
    done = subprocess.run(command, cwd=ROOT, env=place.environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} failed:\n{(done.stderr or done.stdout)[-2000:]}")


def drop_other_engines(place: Workplace) -> None:
    """Remove the engines of other commits."""
    for folder in (place.directory / "engines").glob("*"):
        if folder.name != place.commit:
            shutil.rmtree(folder)


def disk_bytes(path: Path) -> int:
    """Return the bytes of a file or of everything in a directory; hard links within it count once."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum({file.stat().st_ino: file.stat().st_size for file in files}.values())
