"""`kvc-trt doctor`: per backend, whether it works here, the versions found, and what would make it work."""

from __future__ import annotations

import platform

import click

from kvc_trt import __version__
from kvc_trt.cli import output


@click.command()
@output.json_option
def command(as_json: bool) -> None:
    """Say which backends this machine can use, and what is missing. Always exits 0: absence is an answer."""
    import psutil

    from kvc_trt.backends.probes import probe_all
    from kvc_trt.engine.stages import cache_root

    probes = probe_all()
    cores, memory = psutil.cpu_count(logical=False), psutil.virtual_memory().total
    cache = cache_root()
    if as_json:
        output.print_json(
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
    click.echo(
        f"kvc-trt {__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"{cores} cores, {output.size(memory)} memory; cache {cache}\n"
    )
    rows = [
        (
            probe.name,
            "yes" if probe.usable else "no",
            ", ".join(f"{name} {version}" for name, version in probe.versions.items()) or "-",
            probe.purpose,
        )
        for probe in probes
    ]
    click.echo(output.table(("backend", "usable", "found", "for"), rows))
    click.echo()
    for probe in probes:
        if not probe.usable:
            way_out = f"; install: {probe.install}" if probe.install else ""
            click.echo(f"{probe.name} needs: {'; '.join(probe.missing)}{way_out}")
