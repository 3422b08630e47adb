"""`kvc-trt export`: files that other runtimes load in place of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from kvc_trt.cli import printing
from kvc_trt.cli.export_dynamo import dynamo
from kvc_trt.cli.export_triton import triton

if TYPE_CHECKING:
    from kvc_trt.backends.tensorrt_llm.llm_api import AttentionBackend, Export, KtCacheDtype


@click.group()
def command() -> None:
    """Write files for other runtimes."""


command.add_command(triton)
command.add_command(dynamo)


@command.command(name="llm-api")
@click.argument("source", metavar="ENGINE_OR_CONFIG", type=click.Path(path_type=Path, exists=True))
@click.option("-o", "--output", "file", default="-", metavar="FILE", help="The YAML file; - prints it.")
@click.option("--force", is_flag=True, help="Replace FILE.")
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
    help="Type of its page bounds; float8_e5m2 halves their traffic and rounds them to two bits.",
)
@click.option(
    "--triton-model",
    metavar="NAME",
    help="Write it as model.yaml of TensorRT-LLM's own Triton model (its llmapi layout), which then loads NAME, a "
    "Hugging Face name or directory.",
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
    `kvc-trt build --config` takes it. The file says what TensorRT-LLM cannot do (it needs Blackwell GPUs) and where its
    RocketKV differs from the policy.
    """
    from kvc_trt.atomic_files import write_new_file
    from kvc_trt.backends.tensorrt_llm.llm_api import export_llm_api
    from kvc_trt.backends.tensorrt_llm.llm_api_file import read_source, yaml_text
    from kvc_trt.backends.tensorrt_llm.triton_model_file import model_yaml

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
        write_new_file(Path(file), text, replace=force)
    if as_json:
        printing.print_json(_as_json(export, None if file == "-" else file))
    elif file == "-":
        click.echo(text, nl=False)
    else:
        click.echo(_summary(export, file))


@command.command(name="tensorrt-llm")
@click.argument("engine_dir", type=click.Path(path_type=Path))
@click.option("-o", "--output", "directory", type=click.Path(path_type=Path), required=True, help="Must not exist yet.")
def tensorrt_llm(engine_dir: Path, directory: Path) -> None:
    """Write an engine of backend tensorrt-llm in TensorRT-LLM's own layout.

    DIRECTORY/prefill and DIRECTORY/decode, each with config.json and rank0.engine, for TensorRT-LLM 1.2 and older.
    """
    from kvc_trt.backends.registry import open_engine
    from kvc_trt.backends.tensorrt_llm.engine_directory import PHASES, export_engine

    export_engine(open_engine(engine_dir, progress=printing.progress()), directory)
    click.echo(f"{directory}: {' and '.join(PHASES)}, each with config.json and rank0.engine")


def _summary(export: Export, file: str) -> str:
    from kvc_trt.backends.tensorrt_llm.llm_api_file import traffic_lines

    parts = [f"{file}: TensorRT-LLM's RocketKV for policy {export.parameters.policy}"]
    for title, lines in (
        ("changed", (*export.changes, *traffic_lines(export))),
        ("limits", export.limits),
        ("differs", export.differences),
        ("warning", export.warnings),
    ):
        parts += [f"{title + ':':<9}{line}" for line in lines]
    return "\n".join(parts)


def _as_json(export: Export, file: str | None) -> dict[str, Any]:
    from dataclasses import asdict

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
