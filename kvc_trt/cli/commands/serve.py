"""`kvc-trt serve`: OpenAI's API over engines, on this machine."""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
import os
import re
from pathlib import Path
from typing import Any, get_args

import click
import cloup

from kvc_trt.backends.registry import names
from kvc_trt.cli.options.serve import ServeArguments
from kvc_trt.cli.options.types import SEALED
from kvc_trt.cli.text.printing import show
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.serving.dynamo.deployment import DeployedEngine, Deployment, Role, Running
from kvc_trt.serving.dynamo.environment import require_dynamo
from kvc_trt.serving.protocol.tools import PARSERS
from kvc_trt.serving.triton.installation import find_triton
from kvc_trt.serving.triton.serve import TritonDeployment, serve_triton

ROLES = get_args(Role)
API_KEY = "KVC_TRT_API_KEY"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@cloup.command()
@cloup.argument("engines", nargs=-1, metavar="[NAME=]ENGINE...")
@cloup.option_group(
    "Where it listens",
    cloup.option("--host", default="127.0.0.1", help=f"Another than loopback wants an API key in ${API_KEY}."),
    cloup.option("--port", type=click.IntRange(0, 65535), default=8000, help="0 takes one that is free."),
    cloup.option(
        "--cors",
        "origins",
        multiple=True,
        metavar="ORIGIN",
        help="Pages of this origin, such as https://example.org, may ask from a browser; * is any. May be repeated.",
    ),
)
@cloup.option_group(
    "What serves",
    cloup.option(
        "--dynamo", "on_dynamo", is_flag=True, help="NVIDIA Dynamo's frontend, and a process for each engine."
    ),
    cloup.option(
        "--triton",
        "on_triton",
        is_flag=True,
        help="Triton Inference Server, on loopback; gRPC and metrics have the two ports after --port.",
    ),
    help="Without either, this process does.",
)
@cloup.option_group(
    "Prefill and decode apart, with Dynamo",
    cloup.option(
        "--role",
        type=click.Choice(ROLES),
        default="aggregated",
        help="frontend takes requests, prefill reads prompts, decode answers them; each is a process of its own.",
    ),
    cloup.option(
        "--store",
        type=click.Path(path_type=Path),
        help="A private directory through which these find each other.  [default: serving, in kvc-trt's cache]",
    ),
)
@cloup.option_group(
    "Engine",
    cloup.option("--rows", type=click.IntRange(min=1), help="Requests answered at once.  [default: max_batch_size]"),
    cloup.option("--queue", type=click.IntRange(min=1), help="Requests that may wait, not more.  [default: 64]"),
    cloup.option(
        "--prefill-slice-ms",
        type=click.FloatRange(min=0, min_open=True),
        help="Longest time for which a newcomer's prompt holds up running answers.  [default: 100]",
    ),
    cloup.option("--backend", type=click.Choice(names()), help="What runs it.  [default: what it was built for]"),
    cloup.option("--threads", type=click.IntRange(min=1), help="CPU threads of each engine.  [default: all cores]"),
    cloup.option(
        "--tool-parser",
        type=click.Choice(tuple(PARSERS)),
        help="The form of the model's calls of tools.  [default: by its chat template]",
    ),
    SEALED,
    cloup.option(
        "--kv-proofs",
        is_flag=True,
        help="Requests may ask by return_kv_proof, digest or lists, for a proof of what the caches kept and read.",
    ),
)
def command(**parameters: Any) -> None:
    """Answer OpenAI's API (chat, completions, models) with engines.

    Each ENGINE is a directory, asked for by NAME, or by the directory's own name. It says when every engine has
    answered, and Ctrl-C ends it after the answers that have begun.

    With roles, prompts are read by some processes and answered by others, of engines that are equal or differ in their
    backend alone; what goes from one to the other is the compressed cache.
    """
    given = ServeArguments(**parameters)
    given.check()
    if given.on_triton:
        _serve_triton(given)
        return
    key = os.environ.get(API_KEY) or None
    check_host(given.host, key)
    served = served_engines(given.engines, given.role)
    where = given.host, given.port, key, given.origins
    if given.needs_dynamo:
        require_dynamo()
        found = Deployment(served, given.role, *where, given.shared_store, given.settings, given.tool_parser)
        asyncio.run(Running(found, show).run())
        return
    require_server()
    from kvc_trt.serving.http.server import LightDeployment, serve

    named = [(one.name, one.engine) for one in served]
    serve(LightDeployment(named, *where, given.settings, given.tool_parser), show)


def require_server() -> None:
    """Raise UnsupportedEnvironment, with the command that installs it, unless the light server can run here."""
    if importlib.util.find_spec("aiohttp") is None:
        raise UnsupportedEnvironment(
            "aiohttp is not installed in this environment", hint="pip install 'kvc-trt[serve]', or make serve"
        )


def _serve_triton(given: ServeArguments) -> None:
    if not is_loopback(given.host):
        raise InputError(
            f"--host {given.host}: Triton asks nobody for a key, so --triton listens on loopback alone",
            hint="put a proxy that asks for one in front",
        )
    served = [(one.name, one.engine) for one in served_engines(given.engines)]
    serve_triton(TritonDeployment(served, given.port, given.settings), find_triton(), show)


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine alone; InputError for an invalid address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise InputError(f"--host {host}: expected an address of this machine, such as 127.0.0.1") from None


def check_host(host: str, api_key: str | None) -> None:
    """Raise InputError for an address that others can reach, unless there is a key that they must show."""
    if not is_loopback(host) and api_key is None:
        raise InputError(
            f"--host {host}: others could use the engines, and there is no API key",
            hint=f"set {API_KEY} to a secret of your own; there is no TLS, so put a proxy with it in front",
        )


def served_engines(arguments: tuple[str, ...], role: Role = "aggregated") -> list[DeployedEngine]:
    """Return the engines of `[NAME=]ENGINE` arguments; InputError for a bad name, or one that is given twice."""
    if role == "frontend" and arguments:
        raise click.UsageError("--role frontend runs no engine; prefill and decode have them")
    if role != "frontend" and not arguments:
        raise click.UsageError("expected at least one ENGINE")
    found: dict[str, DeployedEngine] = {}
    for argument in arguments:
        name, separator, directory = argument.partition("=")
        path = Path(directory if separator else argument)
        name = name if separator else path.absolute().name
        if not _NAME.fullmatch(name):
            wrong = f"{name!r} cannot be a model's name: expected letters, digits, '_', '.' and '-'"
            raise InputError(wrong, hint="NAME=ENGINE")
        if name in found:
            raise InputError(f"two engines have the name {name}", hint="give one of them another: NAME=ENGINE")
        found[name] = DeployedEngine(name, path)
    return list(found.values())
