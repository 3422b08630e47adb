"""`kvc-trt policies`: what a policy name stands for, and where it comes from."""

from __future__ import annotations

import click

from kvc_trt.cli import output


@click.command()
@output.json_option
def command(as_json: bool) -> None:
    """List the KV-cache policies."""
    from kvc_trt.policies import available

    policies = available()
    if as_json:
        entries = [{**entry._asdict(), "overrides": list(entry.overrides)} for entry in policies]
        output.print_json({"policies": entries})
        return
    click.echo(output.table(("name", "what it does", "source"), [entry[:3] for entry in policies]))
