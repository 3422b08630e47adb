"""The environment variables of Dynamo's processes, which keep them on this machine and out of HOME.

Dynamo binds to outward addresses by default, and authenticates nobody. The names are those of ai-dynamo 1.6.1.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.files.cache import cache_root

DYNAMO_VERSION = "1.6.1"
"""The only supported version: others may have another interface to engines and other names than those below."""
NIXL_VERSION = "1.5.1"
"""The supported version of nixl-cu12, whose interface to backends is not stable."""
INSTALL = (
    "make dynamo-env, then build/dynamo/bin/kvc-trt serve --dynamo; or pip install 'kvc-trt[dynamo]' and "
    f"pip install --no-deps ai-dynamo=={DYNAMO_VERSION}"
)

ON_THIS_MACHINE = {
    "DYN_TCP_RPC_HOST": "127.0.0.1",  # an address: where workers take requests
    "DYN_TCP_RESPONSE_STREAM_HOST": "lo",  # an interface: where the frontend takes answers
    "DYN_SYSTEM_HOST": "127.0.0.1",  # an address: a worker's status and metrics
    "UCX_NET_DEVICES": "lo",  # an interface: NIXL reads memory through it
    "DYN_DISCOVERY_BACKEND": "file",
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_EVENT_PLANE": "zmq",
    "HF_HUB_OFFLINE": "1",
    "DYN_SELF_HOST_METADATA": "0",
}
_DEFAULTS = {
    "DYN_LOG": "warn",
    "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
    "NIXL_LOG_LEVEL": "WARN",
    "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1",
    "DYN_PREFILL_DRAIN_TIMEOUT_S": "10",
}
"""Variables that a user may set, with our defaults."""
_HARMFUL = ("DYN_ENGINE_REQUEST_LIMIT", "DYN_MIGRATION_LIMIT", "DYN_NAMESPACE", "DYN_NAMESPACE_PREFIX")
"""Variables that are removed: they exclude a worker for good, read prompts twice, or hide workers from the frontend."""
_SECRET = "KVC_TRT_API_KEY"
"""The variable with the gateway's API key, which no other process needs."""


def require_dynamo() -> None:
    """Raise UnsupportedEnvironment, with the command that installs it, unless this environment has Dynamo."""
    if importlib.util.find_spec("dynamo") is None:
        raise UnsupportedEnvironment("NVIDIA Dynamo is not installed in this environment", hint=INSTALL)
    found = metadata.version("ai-dynamo")
    if found != DYNAMO_VERSION:
        raise UnsupportedEnvironment(f"ai-dynamo {found} is installed, expected {DYNAMO_VERSION}", hint=INSTALL)


def process_environment(store: Path, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a Dynamo process that finds the others on this machine through the directory `store`.

    `given` is the user's environment (None: this process's); it cannot override variables that must have our values.
    """
    chosen = dict(os.environ if given is None else given)
    for name in (*_HARMFUL, _SECRET):
        chosen.pop(name, None)
    chosen = {**_DEFAULTS, **chosen, **ON_THIS_MACHINE}
    chosen["DYN_FILE_KV"] = str(store / "found")
    chosen.setdefault("KVC_TRT_CACHE", str(cache_root()))
    chosen["HOME"] = str(store / "home")  # the frontend keeps copies of model directories there
    return chosen
