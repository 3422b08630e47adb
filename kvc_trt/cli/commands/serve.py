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
    "Address",
    cloup.option(
        "--host", default="127.0.0.1", help=f"Address to listen on; any but loopback requires an API key in ${API_KEY}."
    ),
    cloup.option("--port", type=click.IntRange(0, 65535), default=8000, help="Port to listen on; 0 picks a free one."),
    cloup.option(
        "--cors",
        "origins",
        multiple=True,
        metavar="ORIGIN",
        help="Allow requests from browser pages of this origin, such as https://example.org; * allows "
        "any. May be repeated.",
    ),
)
@cloup.option_group(
    "Server",
    cloup.option(
        "--dynamo",
        "on_dynamo",
        is_flag=True,
        help="Serve through NVIDIA Dynamo's frontend, with a process for each engine.",
    ),
    cloup.option(
        "--triton",
        "on_triton",
        is_flag=True,
        help="Serve through Triton Inference Server, on loopback; gRPC and metrics use the two ports after --port.",
    ),
    help="Without either, this process serves.",
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
        help="Private directory through which these processes find each other.  [default: serving, in kvc-trt's cache]",
    ),
)
@cloup.option_group(
    "Engine",
    cloup.option("--rows", type=click.IntRange(min=1), help="Requests answered at once.  [default: max_batch_size]"),
    cloup.option(
        "--queue", type=click.IntRange(min=1), help="Most requests that may wait in the queue.  [default: 64]"
    ),
    cloup.option(
        "--prefill-slice-ms",
        type=click.FloatRange(min=0, min_open=True),
        help="Longest time that a new request's prompt may delay running answers.  [default: 100]",
    ),
    cloup.option(
        "--backend",
        type=click.Choice(names()),
        help="Backend that runs the engine.  [default: the one it was built for]",
    ),
    cloup.option("--threads", type=click.IntRange(min=1), help="CPU threads of each engine.  [default: all cores]"),
    cloup.option(
        "--tool-parser",
        type=click.Choice(tuple(PARSERS)),
        help="Format of the model's tool calls.  [default: by its chat template]",
    ),
    SEALED,
    cloup.option(
        "--kv-proofs",
        is_flag=True,
        help="Let requests ask, by return_kv_proof digest or lists, for a proof of what the caches kept and read.",
    ),
)
def command(**parameters: Any) -> None:
    """Answer OpenAI's API (chat, completions, models) with engines.

    Each ENGINE is a directory, served as the model NAME, or under the directory's own name. The server is ready when it
    says so, after every engine has answered once; Ctrl-C ends it after the answers in progress.

    With roles, some processes read prompts and others answer them, with engines that are equal or differ only in their
    backend; the compressed cache is sent from one to the other.
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
            f"--host {given.host}: Triton checks no API key, so --triton listens on loopback only",
            hint="put a proxy that checks one in front",
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
