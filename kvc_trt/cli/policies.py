"""`kvc-trt policies`: what a policy name stands for, and where it comes from."""

from __future__ import annotations

import click

from kvc_trt.cli import output


@click.command()
@output.json_option
def command(as_json: bool) -> None:
    """List the KV-cache policies."""
    from kvc_trt.policies import describe

    policies = describe()
    if as_json:
        entries = [{**entry._asdict(), "overrides": list(entry.overrides)} for entry in policies]
        output.print_json({"policies": entries})
        return
    headers = ("name", "prefill eviction", "decode selection", "what it does", "source")
    rows = [(one.name, one.prompt_eviction, one.decode_selection, one.summary, one.source) for one in policies]
    click.echo(output.table(headers, rows))
