"""`kvc-trt tune`: which policy, budget and cache format, by measurement on the user's own prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import cloup

from kvc_trt.cli.options.output import OutputPath
from kvc_trt.cli.options.types import Bytes, Names
from kvc_trt.cli.text.printing import json_option, print_json, progress, show
from kvc_trt.errors import VerificationFailed
from kvc_trt.sizes import readable_size
from kvc_trt.tables import text_table

if TYPE_CHECKING:
    from kvc_trt.tuning.result import Tuned

_SHOWN = 12
"""Candidates in the terminal's table; the page has all."""


@cloup.command(name="tune")
@cloup.option_group(
    "Model and prompts",
    cloup.option(
        "--model",
        required=True,
        metavar="NAME|PATH|ORG/NAME",
        help="A preset, a Hugging Face directory, a GGUF file, or a repository of the Hub.",
    ),
    cloup.option("--checkpoint", metavar="PATH", help="Weights of the preset, if it does not find them itself."),
    cloup.option(
        "--weights",
        type=click.Choice(["auto", "fp32", "fp16", "int8", "int4", "keep"]),
        default="auto",
        help="Format of stored weights; auto is fp32, choose another if that does not fit.",
    ),
    cloup.option(
        "--data",
        type=click.Path(path_type=Path),
        required=True,
        metavar="FILE",
        help="JSON lines file of your prompts (docs/data.md).",
    ),
    cloup.option("--sets", type=Names(), help="Ask only these sets of the file."),
    cloup.option("--samples", type=int, help="Prompts to choose by, drawn from the file.  [default: all]"),
    cloup.option(
        "--framing",
        type=click.Choice(["plain", "chat"]),
        help="plain text, or chat by the model's template.  [default: chat if it has one]",
    ),
    cloup.option(
        "--truncate",
        type=click.Choice(["middle"]),
        help="Leave out the middle of prompts that are too long.  [default: refuse them]",
    ),
    cloup.option("--max-new-tokens", type=int, help="Longest answer in tokens.  [default: each question's own]"),
)
@cloup.option_group(
    "Limits",
    cloup.option(
        "--memory", type=Bytes(), required=True, help="Memory for the caches of all rows, such as 2GiB or 192MiB."
    ),
    cloup.option("--rows", type=int, default=8, help="Sequences decoded together."),
    cloup.option("--max-step-ms", type=float, help="Longest time that a step of all rows may take."),
    cloup.option(
        "--gpu", help="Take step times from the bandwidth of this GPU, as in `plan`.  [default: measure them here]"
    ),
    cloup.option(
        "--maximum-loss",
        type=click.FloatRange(0, 100),
        default=0.0,
        help="Largest loss of right answers, in points, beyond what chance explains.",
    ),
    cloup.option(
        "--maximum-divergence",
        type=click.FloatRange(0),
        default=0.1,
        help="Where no answers are known: largest divergence from the whole cache, in nats per token.",
    ),
)
@cloup.option_group(
    "Candidates and time",
    cloup.option(
        "--policies",
        type=Names(),
        help="Policies to try, with settings after colons (snapkv-gqa:pool_kernel=17).  [default: "
        "ten, with alternatives]",
    ),
    cloup.option("--formats", type=Names(), help="Cache formats to try.  [default: auto,int8,int4]"),
    cloup.option(
        "--minutes", type=float, help="Begin no further answer after this many minutes.  [default: ask every prompt]"
    ),
    cloup.option("--seed", type=int, default=0, help="Seed of the order in which prompts are asked."),
    cloup.option(
        "-o",
        "--output-dir",
        type=OutputPath(file_okay=False),
        required=True,
        metavar="DIR",
        help="Directory for the answers, stored one by one, and the report.",
    ),
)
@json_option
def command(
    model: str, checkpoint: str | None, weights: str, output_dir: Path, maximum_loss: float, as_json: bool, **given: Any
) -> None:
    """Choose a policy, its budget and a cache format for a memory limit, by measurement on your own prompts.

    Candidates that fit are asked your prompts, a few first; those that fall behind are dropped, and the others are
    asked more. Each prompt is read once for all of them. Writes DIR/tune.html, tune.json, candidates.csv, and
    build.yaml for `kvc-trt build --config`. A run that was stopped goes on where it was. Exit code 1 if no candidate is
    good enough.
    """  # fmt: skip
    from kvc_trt.tuning.request import TuneRequest
    from kvc_trt.tuning.run import tune_model

    asked = TuneRequest(directory=output_dir, maximum_loss=maximum_loss / 100, **given)
    tuned = tune_model(model, asked, weights=weights, checkpoint=checkpoint, progress=progress())
    if as_json:
        print_json(tuned.to_json())
    else:
        show(_text(tuned, output_dir))
    if tuned.recommendation is None:
        return
    if not tuned.whole_answers:
        message = f"{output_dir}: the whole cache answers none of the prompts"
        raise VerificationFailed(message, hint="check the file's answers, and --framing")
    if not tuned.good_enough:
        allowed = "--maximum-loss" if tuned.labelled else "--maximum-divergence"
        raise VerificationFailed(
            f"{output_dir}: no candidate is good enough in {readable_size(tuned.asked.row_limit)} a row",
            hint=f"more --memory, fewer --rows, or a larger {allowed}",
        )


def _text(tuned: Tuned, directory: Path) -> str:
    """Return the findings, the best candidates, and where the files are."""
    rows = [
        [
            str(line.number),
            str(line.candidate),
            readable_size(line.candidate.row_bytes),
            "" if line.quality is None else tuned.quality_text(line.quality),
            "" if line.lost is None else tuned.loss_text(line.lost),
            "" if line.step_seconds is None else f"{1e3 * line.step_seconds:.3g}",
            str(line.prompts),
            line.place,
        ]
        for line in tuned.lines[:_SHOWN]
    ]
    headers = ["no.", "candidate", "cache/row", "quality", "lost against the whole cache", "step ms", "n", ""]
    parts = ["\n".join(tuned.findings()), text_table(headers, rows, right=(0, 2, 3, 4, 5, 6))]
    if len(tuned.lines) > _SHOWN:
        parts[-1] += f"\nand {len(tuned.lines) - _SHOWN} others"
    if tuned.times is not None:
        parts.append(f"step times: {tuned.times.how}")
    parts.append(f"page: {directory / 'tune.html'}")
    if tuned.good_enough:
        parts[-1] += f"\nbuild it: kvc-trt build --config {directory / 'build.yaml'} -o engines/NAME"
    return "\n\n".join(parts)
