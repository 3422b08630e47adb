"""`kvc-trt build`: flags, a YAML file and `--set` become one configuration; the result is an engine directory."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvc_trt.cli import output
from kvc_trt.cli.describe import describe_parameters
from kvc_trt.sizes import readable_size

if TYPE_CHECKING:
    from kvc_trt.backends import Backend
    from kvc_trt.config import BuildConfig
    from kvc_trt.engine.build import BuildResult
    from kvc_trt.engine.model_choice import ModelSource
    from kvc_trt.engine.request import Request
    from kvc_trt.progress import Progress
    from kvc_trt.verify.report import Report

_SPLIT_HELP = "How the compression is divided between eviction and selection: adaptive, even, or a share in 0..1."


class _NumberOr(click.ParamType):  # type: ignore[type-arg]  # generic only in recent versions of click
    """A number, or one of a few words."""

    name = "number"

    def __init__(self, number: type[int] | type[float], *words: str) -> None:
        self._number, self._words = number, words

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        if value in self._words or not isinstance(value, str):
            return value
        try:
            return self._number(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor {' or '.join(self._words)}", parameter, context)


@click.command()
@click.option("--model", metavar="NAME|DIR", help="A preset (`kvc-trt models`) or a Hugging Face directory.")
@click.option("--policy", help="A KV-cache policy (`kvc-trt policies`).  [default: the preset's, or rocketkv]")
@click.option("--token-budget", type=int, help="K/V pairs that one step may read per layer and KV head.")
@click.option("--max-input-len", type=int, help="Longest prompt in tokens.")
@click.option("--max-output-len", type=int, help="Most tokens generated per prompt.")
@click.option("--max-batch-size", type=int, help="Most rows decoded together.  [default: 8]")
@click.option("--checkpoint", metavar="DIR", help="Hugging Face directory with the preset's weights.")
@click.option("--revision", help="Commit, tag or branch to fetch from the Hugging Face Hub.")
@click.option("--random-weights", type=int, metavar="SEED", help="Random weights: real shapes without a checkpoint.")
@click.option(
    "--weights",
    type=click.Choice(["auto", "fp32", "fp16", "bf16", "fp8", "int8", "int4"]),
    help="Stored weights; bf16 on a GPU only, int8 and int4 on a CPU only.  [default: auto]",
)
@click.option(
    "--backend",
    type=click.Choice(["auto", "onnxruntime", "tensorrt", "tensorrt-llm", "torch"]),
    help="What will run the engine.  [default: auto]",
)
@click.option(
    "--dense-until",
    type=_NumberOr(int, "auto"),
    metavar="TOKENS|auto",
    help="Attend densely up to this many cached tokens; auto measures the break-even.  [default: the token budget]",
)
@click.option("--split", type=_NumberOr(float, "adaptive", "even"), metavar="SPLIT", help=_SPLIT_HELP)
@click.option(
    "--layer-budget",
    type=click.Choice(["uniform", "squeeze", "squeeze-online"]),
    help="Divide what is kept among layers: alike, by what calibration prompts say, or anew for each prompt.",
)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any other setting, e.g. page_size=8.")
@click.option(
    "--config",
    "configuration",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A YAML file of settings, or an engine's config.json to build again; flags win over it.",
)
@click.option("-o", "--output", "directory", type=click.Path(path_type=Path), help="[default: engines/MODEL-POLICY]")
@click.option("--force", is_flag=True, help="Replace an engine at the output, once the new one is whole.")
@click.option("--no-verify", is_flag=True, help="Do not check the engine against the PyTorch reference.")
@output.json_option
def command(
    settings: tuple[str, ...],
    configuration: Path | None,
    directory: Path | None,
    force: bool,
    no_verify: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Build an engine directory from a checkpoint and a KV-cache policy, then verify it.

    The directory appears whole or not at all. An interrupted build goes on from its finished stages; building the same
    inputs again finds the engine up to date.
    """
    from kvc_trt.backends import select_backend
    from kvc_trt.backends.builders import builder_for
    from kvc_trt.engine.build import build_engine
    from kvc_trt.engine.model_choice import choose_model, open_source
    from kvc_trt.engine.request import for_source, resolve
    from kvc_trt.verify.calibration import calibrated

    config, recorded = _configuration(configuration, settings, flags)
    verify = config.verify and not no_verify
    if verify:
        _check_verifiable()
    backend = select_backend(config.backend)
    builder = builder_for(backend.name)
    progress = output.progress()
    choice = choose_model(config.model, config.checkpoint)
    request = resolve(config, choice, backend.name, recorded=recorded, measure_break_even=builder.measure_break_even)
    if verify:
        _check_rows(request)
    output_directory = directory or Path("engines") / _default_name(choice.name, request.config.policy)
    choice, source = open_source(choice, request.config)
    request = calibrated(for_source(request, choice, source), source, progress)
    progress.note(f"backend: {backend.name} ({backend.reason})")
    if choice.quantised and request.config.weights != "fp8":
        progress.note(f"weights: the checkpoint's matrices in fp8 are dequantised for {request.config.weights}")
    result = build_engine(
        request, source, builder.makers(request, source, progress), output_directory,
        target=builder.target(request), force=force, progress=progress,
    )  # fmt: skip
    report = _verify(result, _checkpoint_beside(request, source), progress) if verify else None
    if as_json:
        output.print_json(_as_json(result, request, backend, report))
    else:
        click.echo(_summary(result, request))
        if report is not None:
            click.echo(report.as_text())
    _judge(report, output_directory)


def _configuration(
    path: Path | None, settings: tuple[str, ...], flags: Mapping[str, Any]
) -> tuple[BuildConfig, dict[str, Any]]:
    from kvc_trt.config import layered, parse_settings, read_configuration
    from kvc_trt.engine.request import replays_unchanged

    from_file, recorded = read_configuration(path) if path is not None else ({}, {})
    given = {name: value for name, value in flags.items() if value is not None}
    by_set = parse_settings(settings)
    config = layered([(str(path), from_file), ("--set", by_set), ("command line", given)])
    return config, recorded if replays_unchanged({**by_set, **given}) else {}


def _default_name(model: str, policy: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]", "-", f"{model}-{policy}").lstrip(".-") or "engine"


def _check_verifiable() -> None:
    """Fail before the work, not after it."""
    from kvc_trt.errors import UnsupportedEnvironment

    if importlib.util.find_spec("torch") is None:
        raise UnsupportedEnvironment(
            "the check after the build needs PyTorch, which is not installed",
            hint="pip install 'kvc-trt[verify]', or build with --no-verify",
        )


def _check_rows(request: Request) -> None:
    """What compiles an engine for a number of rows takes long: too few for the check after it are refused before."""
    if request.config.backend == "tensorrt":
        from kvc_trt.verify.target_tensorrt import check_rows

        check_rows(request.config.max_batch_size, "the engine")


def _checkpoint_beside(request: Request, source: ModelSource) -> Path | None:
    """The checkpoint, where its weights were quantised: verify then says what that cost."""
    return source.directory if request.config.weights in ("int8", "int4") else None


def _verify(result: BuildResult, checkpoint: Path | None, progress: Progress) -> Report | None:
    """Run the quick ladder, unless this very engine has passed it before."""
    from kvc_trt.engine.verified import is_verified, record_verified

    if result.status == "up to date" and is_verified(result.engine):
        progress.note("verification: passed after an earlier build of this engine")
        return None
    from kvc_trt.backends.session import RUNNERS
    from kvc_trt.verify.ladder import verify

    built_for = result.engine.backend
    backend = built_for if built_for in RUNNERS[built_for] else RUNNERS[built_for][0]
    if backend != built_for:
        progress.note(f"verification: {backend} runs the engine's weights; nothing here runs plans of {built_for}")
    report = verify(result.engine, level="quick", backend=backend, checkpoint=checkpoint, progress=progress)
    if report.passed:
        record_verified(result.engine)
    return report


def _judge(report: Report | None, target: Path) -> None:
    from kvc_trt.errors import VerificationFailed

    if report is not None and not report.passed:
        reason = report.failures[0] if report.failures else "nothing could be checked"
        message = f"{target} was built, but did not pass verification: {reason}"
        raise VerificationFailed(message, hint=f"kvc-trt verify {target}")


def _summary(result: BuildResult, request: Request) -> str:
    engine, parameters = result.engine, request.parameters
    total = sum(record.size for record in engine.files.values())
    lines = [
        f"{engine.path}: {result.status} in {result.seconds:.1f} s, {readable_size(total)} ({request.config.weights})",
        f"policy {parameters.policy}: {describe_parameters(parameters)}",
    ]
    if result.resumed:
        lines.append(f"resumed an interrupted build: kept {', '.join(result.resumed)}")
    return "\n".join(lines)


def _as_json(result: BuildResult, request: Request, backend: Backend, report: Report | None) -> dict[str, Any]:
    return {
        "engine": str(result.engine.path),
        "status": result.status,
        "seconds": round(result.seconds, 3),
        "backend": {"name": backend.name, "versions": backend.versions, "reason": backend.reason},
        "resumed": list(result.resumed),
        "configuration": request.config.stored(),
        "parameters": asdict(request.parameters),
        "stages": result.engine.manifest["stages"],
        "verification": None if report is None else report.to_json(),
    }
