"""`kvc-trt doctor`: for each backend, whether it works here, the versions found, and the commands that would make it
work."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import click

from kvc_trt.backends.registry import probe_all
from kvc_trt.cli.text import printing
from kvc_trt.files.cache import cache_root
from kvc_trt.sizes import readable_size
from kvc_trt.tables import text_table
from kvc_trt.version import __version__

if TYPE_CHECKING:
    from kvc_trt.backends.probes import Probe


@click.command()
@printing.json_option
def command(as_json: bool) -> None:
    """Show which backends this machine can use, and what the others lack. The exit code is always 0."""
    import psutil

    probes = probe_all()
    cores, memory = psutil.cpu_count(logical=False), psutil.virtual_memory().total
    cache = cache_root()
    if as_json:
        printing.print_json(
            {
                "version": __version__,
                "python": platform.python_version(),
                "machine": platform.machine(),
                "physical_cores": cores,
                "memory_bytes": memory,
                "cache": str(cache),
                "backends": [probe.to_json() for probe in probes],
            }
        )
        return
    printing.show(
        f"kvc-trt {__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"{cores} cores, {readable_size(memory)} memory; cache {cache}\n"
    )
    rows = [(probe.name, "yes" if probe.usable else "no", probe.purpose) for probe in probes]
    printing.show(text_table(("backend", "usable", "for"), rows))
    for probe in probes:
        printing.show(f"\n{describe(probe)}")


def describe(probe: Probe) -> str:
    """Return the lines on one backend: the versions found, the missing requirements, and the commands that install
    them."""
    lines = [("found", f"{name} {version}") for name, version in probe.versions.items()]
    lines += [("needs", lack) for lack in probe.missing]
    lines += [("next", command) for command in probe.install]
    return "\n".join([probe.name, *(f"  {kind:5}  {text}" for kind, text in lines or [("found", "nothing")])])
