"""`kvc-trt build`: flags, a YAML file and `--set` become one configuration; the result is an engine directory."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvc_trt.backends.registry import names
from kvc_trt.cli import printing
from kvc_trt.cli.policy_text import describe_parameters
from kvc_trt.sizes import readable_size

if TYPE_CHECKING:
    from kvc_trt.building import Built

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
    type=click.Choice(["auto", *names()]),
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
@printing.json_option
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
    from kvc_trt.building import build_configured
    from kvc_trt.config import configured, parse_settings

    given = {name: value for name, value in flags.items() if value is not None}
    config, recorded = configured(configuration, ("--set", parse_settings(settings)), ("command line", given))
    built = build_configured(
        config,
        recorded=recorded,
        output=directory,
        force=force,
        verify=not no_verify,
        progress=printing.progress(),
    )
    if as_json:
        printing.print_json(_as_json(built))
    else:
        click.echo(_summary(built))
        if built.report is not None:
            click.echo(built.report.as_text())
    built.require_verified()


def _summary(built: Built) -> str:
    result, request = built.result, built.request
    engine, parameters = result.engine, request.parameters
    total = sum(record.size for record in engine.files.values())
    lines = [
        f"{engine.path}: {result.status} in {result.seconds:.1f} s, {readable_size(total)} ({request.config.weights})",
        f"policy {parameters.policy}: {describe_parameters(parameters)}",
    ]
    if result.resumed:
        lines.append(f"resumed an interrupted build: kept {', '.join(result.resumed)}")
    return "\n".join(lines)


def _as_json(built: Built) -> dict[str, Any]:
    result, request, backend = built.result, built.request, built.backend
    return {
        "engine": str(result.engine.path),
        "status": result.status,
        "seconds": round(result.seconds, 3),
        "backend": {"name": backend.name, "versions": backend.versions, "reason": backend.reason},
        "resumed": list(result.resumed),
        "configuration": request.config.stored(),
        "parameters": asdict(request.parameters),
        "stages": result.engine.manifest["stages"],
        "verification": None if built.report is None else built.report.to_json(),
    }
