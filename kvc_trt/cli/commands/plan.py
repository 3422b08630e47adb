"""`kvc-trt plan`: the memory, traffic and speed of an engine, before anything is built."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import cloup

from kvc_trt.backends.registry import names
from kvc_trt.cli.options.build import TENSOR_PARALLEL, WEIGHTS, policy_options
from kvc_trt.cli.options.types import Bandwidth, Bytes
from kvc_trt.cli.text.plan.budgets import compare_text, limit_text
from kvc_trt.cli.text.plan.sections import plan_text
from kvc_trt.cli.text.printing import json_option, print_json, show
from kvc_trt.config import configured, parse_settings
from kvc_trt.profile.planning.question import PlanQuestion, answered

DEFAULT_BANDWIDTH = 12.5e9
"""Bytes per second: 100 Gbit/s."""


@cloup.command(name="plan")
@cloup.option_group(
    "Model and weights",
    cloup.option(
        "--model",
        metavar="NAME|PATH|ORG/NAME",
        help="A preset, a Hugging Face directory, its config.json, a GGUF file, or a repository of the Hub.",
    ),
    cloup.option("--weights", type=click.Choice(WEIGHTS), help="Format of stored weights; auto is the model's own."),
)
@policy_options()
@cloup.option_group(
    "Engine",
    cloup.option(
        "--backend",
        type=click.Choice(names()),
        help="Backend to plan for; adds the memory that the engine takes there.",
    ),
    cloup.option("--max-batch-size", type=int, help="Largest number of rows decoded together, for that memory."),
    TENSOR_PARALLEL,
    cloup.option(
        "--draft-tokens", type=int, metavar="2..8", help="Include the graph that checks drafts of this many tokens."
    ),
    cloup.option("--config", "config_file", type=click.Path(path_type=Path), help="YAML file of a build's settings."),
)
@cloup.option_group(
    "Output",
    cloup.option(
        "--gpu",
        "gpus",
        multiple=True,
        metavar="NAME",
        help="h100, h200, a100, l40s, b200, rtx-pro-6000, or NAME=bandwidth,TFLOPS,GiB as in mine=900GB/s,120,24.  "
        "[default: h100 and h200]",
    ),
    cloup.option("--compare", is_flag=True, help="Compare the bytes that all policies store and read at this budget."),
    cloup.option(
        "--memory",
        type=Bytes(),
        help="Find the largest budget of each policy and cache format whose caches fit this memory, such as 60MiB.",
    ),
    cloup.option(
        "--rows",
        type=click.IntRange(min=1),
        help="Rows that share --memory; without --memory, find the largest budgets at which this many "
        "rows fit each GPU.",
    ),
    cloup.option(
        "--mix",
        type=click.Path(path_type=Path),
        help="YAML file of requests of several lengths, to predict requests per second.",
    ),
)
@cloup.option_group(
    "Prefill and decode on different machines",
    cloup.option(
        "--disaggregated", is_flag=True, help="Show the traffic between the machines, and the number of each."
    ),
    cloup.option("--bandwidth", type=Bandwidth(), help="Bandwidth of the network between them.  [default: 12.5GB/s]"),
)
@json_option
def command(
    config_file: Path | None,
    settings: tuple[str, ...],
    disaggregated: bool,
    bandwidth: float | None,
    as_json: bool,
    **others: Any,
) -> None:
    """Predict cache size, traffic and the bandwidth floor of an engine; needs neither weights nor a GPU."""
    if bandwidth is not None and not disaggregated:
        raise click.UsageError("--bandwidth goes with --disaggregated")
    asked = {field.name: others.pop(field.name) for field in fields(PlanQuestion) if field.name in others}
    question = PlanQuestion(**asked, network=bandwidth or DEFAULT_BANDWIDTH if disaggregated else None)
    given = {name: value for name, value in others.items() if value is not None}
    by_set = parse_settings(settings)
    question.check({**by_set, **given})
    config, _ = configured(config_file, ("--set", by_set), ("the command line", given))
    plan = answered(config, question)
    if as_json:
        print_json(plan)
    elif question.compare:
        show(compare_text(plan))
    elif question.limited:
        show(limit_text(plan))
    else:
        show(plan_text(plan))
