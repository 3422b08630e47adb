"""`kvc-trt policies`: what a policy does, where it comes from, and which backends have engines of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvc_trt.backends.registry import backends, names
from kvc_trt.cli.text import printing
from kvc_trt.engine.supported import supporting
from kvc_trt.models.presets import load_preset
from kvc_trt.policies import describe, named, resolve
from kvc_trt.tables import text_table

if TYPE_CHECKING:
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.policies import PolicyParameters

_TOKEN_BUDGET, _MAX_INPUT_LEN, _MAX_OUTPUT_LEN = 512, 4096, 64
"""Numbers that every policy can be resolved for; which backends support a policy does not depend on them."""


@click.command()
@printing.json_option
@click.option("--turns", is_flag=True, help="Print the effect of a conversation's turn under each policy, as Markdown.")
@click.option("--drafts", is_flag=True, help="Print the tokens that a draft reads under each policy, as Markdown.")
@click.option(
    "--kernels",
    is_flag=True,
    help="Print the parts that run in PyTorch without a kernel under each policy, as Markdown.",
)
def command(as_json: bool, turns: bool, drafts: bool, kernels: bool) -> None:
    """List the KV-cache policies."""
    if as_json + turns + drafts + kernels > 1:
        raise click.UsageError("give one of --json, --turns, --drafts and --kernels")
    if turns:
        printing.show(turn_table())
        return
    if drafts:
        printing.show(draft_table())
        return
    if kernels:
        printing.show(kernel_table())
        return
    policies = [(one, engines(one.name)) for one in describe()]
    if as_json:
        entries = [{**one._asdict(), "overrides": list(one.overrides), "engines": able} for one, able in policies]
        printing.print_json({"policies": entries})
        return
    headers = ("name", "prefill eviction", "decode selection", "engines", "what it does", "source")
    rows = [
        (one.name, kinds.eviction.name, kinds.selection.name, _engines_text(able), one.summary, one.source)
        for one, able in policies
        if (kinds := named(one.name))
    ]
    printing.show(text_table(headers, rows))


def turn_table() -> str:
    """Return the table of docs/conversations.md: the effect of a turn under each policy that engines can have."""
    rows: dict[str, list[str]] = {}
    for one in describe():
        if not named(one.name).selection.oracle:
            rows.setdefault(one.turn or "There are no turns.", []).append(f"`{one.name}`")
    lines = [f"| {', '.join(names)} | {turn} |" for turn, names in rows.items()]
    return "\n".join(["| policy | after a turn |", "|---|---|", *lines])


def draft_table() -> str:
    """Return the table of docs/speculation.md: the tokens that a draft reads under each policy that engines can
    have."""
    rows: dict[str, list[str]] = {}
    for one in describe():
        selection = named(one.name).selection
        if selection.no_drafts is not None:
            text = f"Refused: {selection.no_drafts}."
        elif selection.reads_a_part:
            text = "Each token selects for itself, as its own decode step would: by the same rule, the same tokens."
        else:
            text = "Each token reads everything that is stored before it."
        if not selection.oracle:
            rows.setdefault(text, []).append(f"`{one.name}`")
    lines = [f"| {', '.join(names)} | {text} |" for text, names in rows.items()]
    return "\n".join(["| policy | the tokens of a draft |", "|---|---|", *lines])


def kernel_table() -> str:
    """Return the table of docs/torch.md: the work that has no kernel under each policy that engines can have."""
    rows: dict[str, list[str]] = {}
    for one in describe():
        if named(one.name).selection.oracle:
            continue
        resolved = _resolved(one.name)
        lines = [found for each in backends().values() if (found := each.without_kernels(*resolved)) is not None]
        text = lines[0].removeprefix(f"{one.name}: ") if lines else "kernels do all of it"
        rows.setdefault(text, []).append(f"`{one.name}`")
    lines = [f"| {', '.join(names)} | {text} |" for text, names in rows.items()]
    return "\n".join(["| policy | in PyTorch |", "|---|---|", *lines])


def engines(policy: str) -> list[str]:
    """Return the backends that can have an engine of the policy; an oracle has none."""
    model, parameters = _resolved(policy)
    return supporting(parameters, model, backends())


def _resolved(policy: str) -> tuple[ModelConfig, PolicyParameters]:
    """Resolve a policy for a model."""
    model = load_preset("llama3.1-8b").config
    parameters = resolve(
        policy, model=model, token_budget=_TOKEN_BUDGET, max_input_len=_MAX_INPUT_LEN, max_output_len=_MAX_OUTPUT_LEN
    )
    return model, parameters


def _engines_text(able: list[str]) -> str:
    return "all" if len(able) == len(names()) else ", ".join(able) or "none: oracle"
