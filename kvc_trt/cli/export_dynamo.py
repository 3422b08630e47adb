"""`kvc-trt export dynamo`: a deployment for a cluster with NVIDIA Dynamo's operator."""

from __future__ import annotations

import re
from pathlib import Path

import click

from kvc_trt.cli import printing
from kvc_trt.errors import InputError

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
"""What Kubernetes takes for the name of a thing, with room for what the operator adds."""
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}")


@click.command(name="dynamo")
@click.argument("engine_dir", type=click.Path(path_type=Path))
@click.option("-o", "--output", "directory", type=click.Path(path_type=Path), required=True, help="Must not exist yet.")
@click.option("--name", help="The model's name, and the deployment's.  [default: ENGINE_DIR's own]")
@click.option("--image", help="The image that the Containerfile makes.  [default: NAME:latest]")
@click.option("--prefill", type=click.IntRange(min=1), default=1, help="Replicas that read prompts.")
@click.option("--decode", type=click.IntRange(min=1), default=1, help="Replicas that answer them.")
@printing.json_option
def dynamo(
    engine_dir: Path, directory: Path, name: str | None, image: str | None, prefill: int, decode: int, as_json: bool
) -> None:
    """Write a DynamoGraphDeployment with prefill and decode workers, a Containerfile, and the engine beside them.

    They follow the schema of Dynamo's operator, and were not run on a cluster. `kvc-trt plan --disaggregated` says how
    many decode replicas one prefill replica feeds.
    """
    from kvc_trt.backends.registry import open_engine
    from kvc_trt.serving.dynamo.cluster import CONTAINER_FILE, DEPLOYMENT_FILE, export_deployment

    chosen = engine_dir.absolute().name if name is None else name
    if not _NAME.fullmatch(chosen):
        raise InputError(
            f"{chosen!r} cannot name a deployment: expected a-z, 0-9 and '-', 40 at most", hint="--name NAME"
        )
    made_of = f"{chosen}:latest" if image is None else image
    if not _IMAGE.fullmatch(made_of):
        raise InputError(f"{made_of!r} is not the name of an image")
    engine = open_engine(engine_dir, progress=printing.progress())
    path = export_deployment(engine, directory, name=chosen, image=made_of, prefill=prefill, decode=decode)
    if as_json:
        printing.print_json({"directory": str(path), "name": chosen, "image": made_of, "engine_sha256": engine.digest})
        return
    click.echo(f"{path}: {DEPLOYMENT_FILE}, {CONTAINER_FILE} and the engine; not run on a cluster")
    click.echo(f"build: podman build -t {made_of} {path}   # after putting kvc-trt's wheel there")
    click.echo(f"start: kubectl apply -f {path / DEPLOYMENT_FILE}")
