"""`kvc-trt build`: flags, a YAML file and `--set` become one configuration; the result is an engine directory."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import cloup

from kvc_trt.backends.registry import backend, names
from kvc_trt.building import Built, build_configured
from kvc_trt.cli.options.build import TENSOR_PARALLEL, WEIGHTS, policy_options
from kvc_trt.cli.options.output import OutputPath
from kvc_trt.cli.options.types import NumberOr
from kvc_trt.cli.text import printing
from kvc_trt.cli.text.policy import compresses_nothing, describe_parameters
from kvc_trt.config import configured, parse_settings
from kvc_trt.errors import escaped
from kvc_trt.sizes import readable_size


@cloup.command()
@cloup.option_group(
    "Model and weights",
    cloup.option(
        "--model",
        metavar="NAME|PATH|ORG/NAME",
        help="A preset (`kvc-trt models`), a Hugging Face directory, a GGUF file, or a repository of the Hub.",
    ),
    cloup.option("--checkpoint", metavar="PATH", help="Hugging Face directory or GGUF file with the preset's weights."),
    cloup.option("--revision", help="Commit, tag or branch to fetch from the Hugging Face Hub."),
    cloup.option(
        "--random-weights",
        type=int,
        metavar="SEED",
        help="Random weights in the model's real shapes; no checkpoint is read.",
    ),
    cloup.option(
        "--weights",
        type=click.Choice(WEIGHTS),
        help="Format of stored weights; bf16 on a GPU only, int8, int4 and keep on a CPU only. keep "
        "stores the blocks of a GGUF file in Q4_0, Q4_1 or Q8_0, or of a checkpoint in AWQ or GPTQ, as they are; "
        "it is the default for them on a CPU, fp32 for others.  [default: auto]",
    ),
)
@policy_options(
    cloup.option(
        "--split",
        type=NumberOr(float, "adaptive", "even"),
        metavar="SPLIT",
        help="How compression is divided between eviction and selection: adaptive, even, or a share in 0..1.",
    ),
    cloup.option(
        "--dense-until",
        type=NumberOr(int, "auto"),
        metavar="TOKENS|auto",
        help="Attend densely up to this many cached tokens; auto measures the break-even.  [default: the token budget]",
    ),
)
@cloup.option_group(
    "Engine",
    cloup.option(
        "--backend", type=click.Choice(["auto", *names()]), help="Backend that will run the engine.  [default: auto]"
    ),
    cloup.option("--max-batch-size", type=int, help="Largest number of rows decoded together.  [default: 8]"),
    TENSOR_PARALLEL,
    cloup.option(
        "--draft-tokens",
        type=int,
        metavar="2..8",
        help="Add the graph that checks drafts of this many tokens, for run --speculate.  [default: none]",
    ),
    cloup.option(
        "--all-logits",
        is_flag=True,
        default=None,
        help="Let turns return the logits after each of their tokens (Engine.turn_logits).",
    ),
    cloup.option(
        "--config",
        "configuration",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="A YAML file of settings, or an engine's config.json to build again; flags override it.",
    ),
    cloup.option(
        "-o",
        "--output",
        "directory",
        type=OutputPath(engine=True),
        help="Directory of the engine.  [default: engines/MODEL-POLICY]",
    ),
    cloup.option(
        "--force", is_flag=True, help="Replace an existing engine at the output path once the new one is complete."
    ),
    cloup.option("--no-verify", is_flag=True, help="Do not check the engine against the PyTorch reference."),
)
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
        printing.show(_summary(built))
        if built.report is not None:
            printing.show(built.report.as_text())
    built.require_verified()


def _summary(built: Built) -> str:
    result, request = built.result, built.request
    engine, parameters = result.engine, request.parameters
    total = sum(record.size for record in engine.files.values())
    lines = [
        f"{engine.path}: {result.status} in {result.seconds:.1f} s, {readable_size(total)} ({request.config.weights})",
        f"policy {parameters.policy}: {describe_parameters(parameters)}",
    ]
    notes = (built.default_taken, compresses_nothing(parameters), _without_kernels(built))
    lines += [note for note in notes if note is not None]
    if result.resumed:
        lines.append(f"resumed an interrupted build: kept {', '.join(result.resumed)}")
    return "\n".join(map(escaped, lines))


def _without_kernels(built: Built) -> str | None:
    """Say which parts of the policy have no kernel on the engine's backend."""
    engine = built.result.engine
    return backend(engine.backend).without_kernels(engine.model, engine.parameters)


def _as_json(built: Built) -> dict[str, Any]:
    result, request, found = built.result, built.request, built.backend
    return {
        "engine": str(result.engine.path),
        "status": result.status,
        "seconds": round(result.seconds, 3),
        "backend": {"name": found.name, "versions": found.versions, "reason": found.reason},
        "default_taken": built.default_taken,
        "without_kernels": _without_kernels(built),
        "resumed": list(result.resumed),
        "configuration": request.config.stored(),
        "parameters": asdict(request.parameters),
        "stages": result.engine.manifest.to_json()["stages"],
        "verification": None if built.report is None else built.report.to_json(),
    }
