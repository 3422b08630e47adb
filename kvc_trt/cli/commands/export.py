"""`kvc-trt export`: files that other runtimes load in place of an engine."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import click

from kvc_trt.backends.opening import open_engine
from kvc_trt.backends.registry import runner
from kvc_trt.backends.tensorrt_llm.engine_directory import PHASES, export_engine
from kvc_trt.backends.tensorrt_llm.llm_api import export_llm_api
from kvc_trt.backends.tensorrt_llm.llm_api_file import read_source, traffic_lines, yaml_text
from kvc_trt.backends.tensorrt_llm.triton_model_file import model_yaml
from kvc_trt.cli.options.output import OutputPath, refuse_inside_engine
from kvc_trt.cli.text import printing
from kvc_trt.errors import InputError
from kvc_trt.files.atomic import write_new_file
from kvc_trt.serving.dynamo.cluster import CONTAINER_FILE, DEPLOYMENT_FILE, export_deployment
from kvc_trt.serving.engine import ServingSettings
from kvc_trt.serving.example import example_text
from kvc_trt.serving.triton.family.ensemble import export_ensemble
from kvc_trt.serving.triton.repository import export_model

if TYPE_CHECKING:
    from kvc_trt.backends.tensorrt_llm.llm_api import AttentionBackend, Export, KtCacheDtype
    from kvc_trt.engine import EngineDirectory

Layout = Literal["single", "ensemble"]
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
"""Names that Kubernetes accepts, short enough for the suffixes of Dynamo's operator."""
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}")


@click.group()
def command() -> None:
    """Write files for other runtimes."""


@command.command(name="llm-api")
@click.argument("source", metavar="ENGINE_OR_CONFIG", type=click.Path(path_type=Path, exists=True))
@click.option("-o", "--output", "file", default="-", metavar="FILE", help="YAML file to write; - prints it.")
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
@click.option(
    "--attention",
    type=click.Choice(["TRTLLM", "VANILLA"], case_sensitive=False),
    default="TRTLLM",
    help="TensorRT-LLM's attention: TRTLLM selects pages, VANILLA single tokens.",
)
@click.option(
    "--kt-cache-dtype",
    type=click.Choice(["bfloat16", "float8_e5m2"]),
    default="bfloat16",
    help="Type of its page bounds; float8_e5m2 halves their traffic and rounds them to a mantissa of two bits.",
)
@click.option(
    "--triton-model",
    metavar="NAME",
    help="Write model.yaml for TensorRT-LLM's own Triton model (its llmapi layout), which then "
    "loads NAME, a Hugging Face name or directory.",
)
@printing.json_option
def llm_api(
    source: Path,
    file: str,
    force: bool,
    attention: str,
    kt_cache_dtype: str,
    triton_model: str | None,
    as_json: bool,
) -> None:
    """Write the YAML with which TensorRT-LLM's own RocketKV runs at this token budget.

    For `LLM(...)` and `trtllm-serve --config`. ENGINE_OR_CONFIG is an engine directory, or a YAML file as
    `kvc-trt build --config` takes it. The file states TensorRT-LLM's limits (it needs Blackwell GPUs) and where its
    RocketKV differs from the policy.
    """
    found = read_source(source)
    export = export_llm_api(
        found.model,
        found.parameters,
        max_batch_size=found.max_batch_size,
        attention=cast("AttentionBackend", attention.upper()),
        kt_cache_dtype=cast("KtCacheDtype", kt_cache_dtype),
    )
    if triton_model is None:
        text = yaml_text(export, source=found.description, model=found.checkpoint)
    else:
        text = model_yaml(export, source=found.description, model=triton_model)
    if file != "-":
        refuse_inside_engine(Path(file))
        write_new_file(Path(file), text, replace=force)
    if as_json:
        printing.print_json(_llm_api_json(export, None if file == "-" else file))
    elif file == "-":
        click.echo(text, nl=False)
    else:
        printing.show(_llm_api_summary(export, file))


@command.command(name="tensorrt-llm")
@click.argument("engine_dir", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    "directory",
    type=OutputPath(),
    required=True,
    help="Directory to write; it must not exist yet.",
)
def tensorrt_llm(engine_dir: Path, directory: Path) -> None:
    """Write an engine of backend tensorrt-llm in TensorRT-LLM's own layout.

    DIRECTORY/prefill and DIRECTORY/decode, each with config.json and rank0.engine, for TensorRT-LLM 1.2 and older.
    """
    export_engine(open_engine(engine_dir, progress=printing.progress()), directory)
    printing.show(f"{directory}: {' and '.join(PHASES)}, each with config.json and rank0.engine")


def _llm_api_summary(export: Export, file: str) -> str:
    parts = [f"{file}: TensorRT-LLM's RocketKV for policy {export.parameters.policy}"]
    for title, lines in (
        ("changed", (*export.changes, *traffic_lines(export))),
        ("limits", export.limits),
        ("differs", export.differences),
        ("warning", export.warnings),
    ):
        parts += [f"{title + ':':<9}{line}" for line in lines]
    return "\n".join(parts)


def _llm_api_json(export: Export, file: str | None) -> dict[str, Any]:
    return {
        "file": file,
        "configuration": export.configuration.model_dump(),
        "parameters": asdict(export.parameters),
        "changes": list(export.changes),
        "traffic": asdict(export.traffic),
        "limits": list(export.limits),
        "differences": list(export.differences),
        "warnings": list(export.warnings),
    }


@command.command(name="triton")
@click.argument("engine_dir", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", "repository", metavar="REPO", type=OutputPath(), required=True,
    help="Directory of the model repository; created if missing.",
)  # fmt: skip
@click.option(
    "--layout",
    type=click.Choice(get_args(Layout)),
    default="single",
    help="single: one model. ensemble: the four models that TensorRT-LLM's clients expect.",
)
@click.option("--name", help="Name by which clients request the single model.  [default: ENGINE_DIR's own]")
@click.option(
    "--rows", type=click.IntRange(min=1), help="Requests answered at once.  [default: the engine's max_batch_size]"
)
@click.option(
    "--queue-limit", type=click.IntRange(min=1), help="Most requests that may wait in the queue.  [default: 64]"
)
@click.option(
    "--memory-bytes",
    type=click.IntRange(min=1),
    help="Memory limit for all rows and one prefill together.  [default: no limit]",
)
@click.option(
    "--prefill-slice-ms", type=click.FloatRange(min=0, min_open=True),
    help="Longest time that a new request's prompt may delay running answers.  [default: 100]",
)  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: all cores]")
@printing.json_option
def triton(
    engine_dir: Path,
    repository: Path,
    layout: Layout,
    name: str | None,
    as_json: bool,
    **load: Any,
) -> None:
    """Write a model repository that tritonserver loads as it is, with the engine in it.

    The server answers many requests together, and streams; kvc-trt has to be installed in its Python. See
    docs/serving-triton.md.
    """
    if layout == "ensemble" and name is not None:
        raise InputError("--name is for --layout single: clients of an ensemble ask for 'ensemble'")
    settings = ServingSettings(**load)
    engine = open_engine(engine_dir, progress=printing.progress())
    runner(engine.backend)
    if layout == "ensemble":
        model = export_ensemble(engine, repository, settings)
    else:
        model = export_model(engine, repository, engine_dir.absolute().name if name is None else name, settings)
    if as_json:
        printing.print_json(_triton_json(engine, model))
    else:
        printing.show(_triton_summary(engine, model, settings.rows or engine.build.max_batch_size))


def _start_line(repository: Path) -> str:
    return (
        f"tritonserver --model-repository={shlex.quote(str(repository.absolute()))} --model-control-mode=none "
        "--http-address=127.0.0.1 --grpc-address=127.0.0.1 --disable-auto-complete-config"
    )


def _triton_summary(engine: EngineDirectory, model: Path, rows: int) -> str:
    longest, policy = engine.parameters.max_input_len, engine.parameters.policy
    prompt = {"input_ids": [1, 2]} if engine.tokenizer is None else {"text_input": example_text(engine.tokenizer)}
    body = shlex.quote(json.dumps({**prompt, "max_tokens": 8}))
    return "\n".join(
        [
            f"{model}: policy {policy}, prompts to {longest:,} tokens, {rows} answers at once",
            f"start: {_start_line(model.parent)}",
            f"ask:   curl 127.0.0.1:8000/v2/models/{model.name}/generate -d {body}",
        ]
    )


def _triton_json(engine: EngineDirectory, model: Path) -> dict[str, Any]:
    return {
        "model": model.name,
        "directory": str(model),
        "engine_sha256": engine.digest,
        "start": _start_line(model.parent),
    }


@command.command(name="dynamo")
@click.argument("engine_dir", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    "directory",
    type=OutputPath(),
    required=True,
    help="Directory to write; it must not exist yet.",
)
@click.option("--name", help="Name of the model and of the deployment.  [default: ENGINE_DIR's own]")
@click.option("--image", help="Image that the Containerfile builds.  [default: NAME:latest]")
@click.option("--prefill", type=click.IntRange(min=1), default=1, help="Number of replicas that read prompts.")
@click.option("--decode", type=click.IntRange(min=1), default=1, help="Number of replicas that answer them.")
@printing.json_option
def dynamo(
    engine_dir: Path, directory: Path, name: str | None, image: str | None, prefill: int, decode: int, as_json: bool
) -> None:
    """Write a DynamoGraphDeployment with prefill and decode workers, a Containerfile, and the engine beside them.

    They follow the schema of Dynamo's operator, and were not run on a cluster. `kvc-trt plan --disaggregated` says how
    many decode replicas one prefill replica feeds.
    """
    chosen = engine_dir.absolute().name if name is None else name
    if not _NAME.fullmatch(chosen):
        raise InputError(
            f"{chosen!r} cannot name a deployment: expected a-z, 0-9 and '-', 40 at most", hint="--name NAME"
        )
    made_of = f"{chosen}:latest" if image is None else image
    if not _IMAGE.fullmatch(made_of):
        raise InputError(f"{made_of!r} is not the name of an image")
    engine = open_engine(engine_dir, progress=printing.progress())
    path = export_deployment(engine, directory, name=chosen, image=made_of, prefill=prefill, decode=decode)
    if as_json:
        printing.print_json({"directory": str(path), "name": chosen, "image": made_of, "engine_sha256": engine.digest})
        return
    printing.show(f"{path}: {DEPLOYMENT_FILE}, {CONTAINER_FILE} and the engine; not run on a cluster")
    printing.show(f"build: podman build -t {made_of} {path}   # after putting kvc-trt's wheel there")
    printing.show(f"start: kubectl apply -f {path / DEPLOYMENT_FILE}")
