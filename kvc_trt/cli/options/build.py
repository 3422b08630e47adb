"""The options that `build` and `plan` share: the policy with its numbers, and any other setting of a build."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from cloup import option, option_group

from kvc_trt.cli.options.types import TokensOrPercent
from kvc_trt.models.cache_formats import CACHE_FORMATS

Function = TypeVar("Function", bound=Callable[..., Any])
Decorator = Callable[[Function], Function]

TENSOR_PARALLEL = option(
    "--tp",
    "tensor_parallel",
    type=int,
    metavar="RANKS",
    help="Divide KV heads and matrices among this many GPUs, one process each (backend torch).  [default: 1]",
)
WEIGHTS = ("auto", "fp32", "fp16", "bf16", "fp8", "int8", "int4", "keep")


def policy_options(*more: Decorator[Any]) -> Decorator[Any]:
    """Add the options of the policy to a command, and `more` in the same section of its help."""
    return option_group(
        "KV-cache policy",
        option("--policy", help="Name of the policy (`kvc-trt policies`).  [default: the preset's, or rocketkv]"),
        option(
            "--token-budget",
            type=TokensOrPercent(),
            help="K/V pairs that one step may read per layer and KV head, or a share (20%) of the longest "
            "prompt; for snapkv, of each prompt.",
        ),
        option("--max-input-len", type=int, help="Longest prompt in tokens."),
        option("--max-output-len", type=int, help="Longest answer in tokens."),
        option(
            "--max-conversation-len",
            type=int,
            help="Longest conversation of several turns in tokens.  [default: one prompt and one answer]",
        ),
        option(
            "--layer-budget",
            type=click.Choice(["uniform", "squeeze", "squeeze-online"]),
            help="Divide the kept tokens among layers: evenly, as measured on calibration prompts, or "
            "anew for each prompt.",
        ),
        option(
            "--kv-cache",
            type=click.Choice(tuple(CACHE_FORMATS)),
            help="Format of cached keys and values: as they are, or in 8 or 4 bits (k8v4: keys in 8, "
            "values in 4).  [default: auto, as they are]",
        ),
        *more,
        option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any other setting, e.g. page_size=8."),
    )
