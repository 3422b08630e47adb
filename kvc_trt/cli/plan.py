"""`kvc-trt plan`: what an engine would store, read and reach, before anything is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvc_trt.backends.registry import names
from kvc_trt.cli.printing import json_option, print_json


@click.command(name="plan")
@click.option("--model", help="Preset name, Hugging Face directory, or its config.json.")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="A build's YAML file.")
@click.option("--policy", help="KV-cache policy (see `kvc-trt policies`).")
@click.option("--token-budget", type=int, help="Tokens' worth of cache that one step may read per KV head.")
@click.option("--max-input-len", type=int, help="Longest prompt, tokens.")
@click.option("--max-output-len", type=int, help="Most tokens generated after it.")
@click.option(
    "--weights",
    type=click.Choice(["auto", "bf16", "fp16", "fp32", "fp8", "int8", "int4"]),
    help="Weight format; auto is the model's own.",
)
@click.option(
    "--backend",
    type=click.Choice(names()),
    help="What the engine is for; tensorrt adds the memory it takes on a GPU.",
)
@click.option("--max-batch-size", type=int, help="Rows of a batch, for the GPU's memory.")
@click.option(
    "--layer-budget",
    type=click.Choice(["uniform", "squeeze", "squeeze-online"]),
    help="Divide what is kept among layers; squeeze is measured by a build, and planned as uniform.",
)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any other setting of a build.")
@click.option("--compare", is_flag=True, help="All policies at this budget: what each stores and reads.")
@json_option
def command(config_file: Path | None, settings: tuple[str, ...], compare: bool, as_json: bool, **flags: Any) -> None:
    """Predict cache size, traffic and the bandwidth floor of an engine; needs neither weights nor a GPU."""
    from kvc_trt.config import configured, parse_settings
    from kvc_trt.profile.plan_request import refuse_overrides, resolve_comparison, resolve_plan

    given = {name: value for name, value in flags.items() if value is not None}
    by_set = parse_settings(settings)
    if compare:
        refuse_overrides(by_set)
    config, _ = configured(config_file, ("--set", by_set), ("the command line", given))
    plan = (resolve_comparison if compare else resolve_plan)(config)
    if as_json:
        print_json(plan)
    elif compare:
        from kvc_trt.cli.plan_text import compare_text

        click.echo(compare_text(plan))
    else:
        from kvc_trt.cli.plan_text import plan_text

        click.echo(plan_text(plan))
