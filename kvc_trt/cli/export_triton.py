"""`kvc-trt export triton`: a model of a Triton repository."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from kvc_trt.cli import printing
from kvc_trt.errors import InputError

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory

Layout = Literal["single", "ensemble"]


@click.command(name="triton")
@click.argument("engine_dir", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", "repository", metavar="REPO", type=click.Path(path_type=Path), required=True,
    help="The model repository; made where there is none.",
)  # fmt: skip
@click.option(
    "--layout",
    type=click.Choice(get_args(Layout)),
    default="single",
    help="single: one model. ensemble: the four models that clients of TensorRT-LLM know.",
)
@click.option("--name", help="The single model's name, which clients ask for.  [default: ENGINE_DIR's own]")
@click.option("--rows", type=click.IntRange(min=1), help="Answers at once.  [default: the engine's max_batch_size]")
@click.option("--queue-limit", type=click.IntRange(min=1), help="Requests that may wait.  [default: 64]")
@click.option(
    "--memory-bytes",
    type=click.IntRange(min=1),
    help="What rows and one prefill may take together.  [default: no limit]",
)
@click.option(
    "--prefill-slice-ms", type=click.FloatRange(min=0, min_open=True),
    help="Longest time for which a newcomer's prompt holds up running answers.  [default: 100]",
)  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: all cores]")
@printing.json_option
def triton(
    engine_dir: Path,
    repository: Path,
    layout: Layout,
    name: str | None,
    rows: int | None,
    queue_limit: int | None,
    memory_bytes: int | None,
    prefill_slice_ms: float | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Write a model repository that tritonserver loads as it is, with the engine in it.

    The server answers many requests together, and streams; kvc-trt has to be installed in its Python. See
    docs/serving.md.
    """
    from kvc_trt.backends.registry import open_engine, runner
    from kvc_trt.serving.engine import ServingSettings
    from kvc_trt.serving.triton.family.ensemble import export_ensemble
    from kvc_trt.serving.triton.repository import export_model

    if layout == "ensemble" and name is not None:
        raise InputError("--name is for --layout single: clients of an ensemble ask for 'ensemble'")
    settings = ServingSettings(rows, queue_limit, memory_bytes, prefill_slice_ms, threads)
    engine = open_engine(engine_dir, progress=printing.progress())
    runner(engine.backend)
    if layout == "ensemble":
        model = export_ensemble(engine, repository, settings)
    else:
        model = export_model(engine, repository, engine_dir.absolute().name if name is None else name, settings)
    if as_json:
        printing.print_json(_as_json(engine, model))
    else:
        click.echo(_summary(engine, model, settings.rows or engine.build.max_batch_size))


def _start_line(repository: Path) -> str:
    return (
        f"tritonserver --model-repository={shlex.quote(str(repository.absolute()))} --model-control-mode=none "
        "--http-address=127.0.0.1 --grpc-address=127.0.0.1 --disable-auto-complete-config"
    )


def _summary(engine: EngineDirectory, model: Path, rows: int) -> str:
    from kvc_trt.serving.example import example_text

    longest, policy = engine.parameters.max_input_len, engine.parameters.policy
    prompt = {"input_ids": [1, 2]} if engine.tokenizer is None else {"text_input": example_text(engine.tokenizer)}
    body = shlex.quote(json.dumps({**prompt, "max_tokens": 8}))
    return "\n".join(
        [
            f"{model}: policy {policy}, prompts to {longest} tokens, {rows} answers at once",
            f"start: {_start_line(model.parent)}",
            f"ask:   curl 127.0.0.1:8000/v2/models/{model.name}/generate -d {body}",
        ]
    )


def _as_json(engine: EngineDirectory, model: Path) -> dict[str, Any]:
    return {
        "model": model.name,
        "directory": str(model),
        "engine_sha256": engine.digest,
        "start": _start_line(model.parent),
    }
