"""`kvc-trt inspect`: checks an engine's integrity and shows its contents; needs no GPU and no runtime."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvc_trt.backends.opening import open_engine
from kvc_trt.cli.text import printing
from kvc_trt.cli.text.layers import full_state, layers_json, layers_text, state_line
from kvc_trt.cli.text.policy import describe_parameters
from kvc_trt.cli.text.printing import ranges
from kvc_trt.engine.verification import verifications_of
from kvc_trt.errors import escaped
from kvc_trt.sizes import readable_size
from kvc_trt.tables import text_table

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory


@click.command()
@click.argument("engine_dir", type=click.Path(path_type=Path))
@click.option("--layers", is_flag=True, help="Show each layer: attention, cosine and group, budget, slots, bytes.")
@printing.json_option
def command(engine_dir: Path, layers: bool, as_json: bool) -> None:
    """Check every byte of ENGINE_DIR and show its contents."""
    engine = open_engine(engine_dir, progress=printing.progress())
    if as_json:
        printing.print_json({**_as_json(engine), **(layers_json(engine) if layers else {})})
    else:
        sections = (_heading(engine), _files(engine), layers_text(engine) if layers else _state(engine))
        printing.show("\n\n".join(sections))


def _heading(engine: EngineDirectory) -> str:
    model, checkpoint = engine.model, engine.manifest.checkpoint
    commit = f", commit {checkpoint.commit}" if checkpoint.commit else ""
    lines = (
        f"{engine.path}: intact, built by kvc-trt {engine.manifest.version} for {engine.backend}",
        f"model      {engine.build.model}: {model.architecture}, {model.num_hidden_layers} layers, "
        f"{model.num_attention_heads} heads on {model.num_key_value_heads} KV heads of {model.head_size}, "
        f"{engine.build.weights} weights, computes in {model.dtype}",
        f"source     {checkpoint.source}{commit}",
        f"policy     {engine.parameters.policy}, token budget {engine.parameters.token_budget}: "
        f"{describe_parameters(engine.parameters)}",
        f"tokenizer  {_tokenizer(engine)}",
        *_verifications(engine),
    )
    return "\n".join(map(escaped, lines))


def _verifications(engine: EngineDirectory) -> Iterable[str]:
    found = verifications_of(engine)
    if not found:
        yield f"verified   no; to check it: kvc-trt verify {engine.path}"
    for one in found:
        sizes = {"samples": one.samples, "steps": one.steps}
        given = ", ".join([f"seed {one.seed}", *(f"{size} {name}" for name, size in sizes.items() if size is not None)])
        verdict = "passed" if one.passed else "FAILED"
        yield f"verified   {one.level}: {verdict} on {one.run_by}, {given}; {one.time}, kvc-trt {one.version}"


def _tokenizer(engine: EngineDirectory) -> str:
    if engine.tokenizer_file is None:
        return "none: prompts are token ids"
    return "yes, without a chat template" if engine.chat_template is None else "yes, with a chat template"


def _files(engine: EngineDirectory) -> str:
    rows = [(name, readable_size(record.size), record.sha256[:12]) for name, record in sorted(engine.files.items())]
    return text_table(("file", "size", "SHA-256"), rows, right=(1,))


def _state(engine: EngineDirectory) -> str:
    """Group the layers whose tensors are alike: 80 equal layers are one line."""
    kinds: dict[tuple[str, str, tuple[int, ...], int], list[int]] = {}
    for tensor in engine.state:
        key = (tensor.name.split(".")[0], tensor.dtype, tensor.shape, tensor.bytes_per_row())
        kinds.setdefault(key, []).append(tensor.layer)
    rows = [
        (name, ranges(layers), dtype, "x".join(map(str, shape)), readable_size(size * len(layers)))
        for (name, dtype, shape, size), layers in kinds.items()
    ]
    headers = ("state", "layers", "dtype", "shape per row", "bytes per row")
    return f"{text_table(headers, rows, right=(4,))}\n{state_line(engine)}"


def _as_json(engine: EngineDirectory) -> dict[str, Any]:
    manifest = engine.manifest.to_json()
    return {
        "engine": str(engine.path),
        "intact": True,
        **engine.config.to_json(),
        "files": {name: asdict(record) for name, record in sorted(engine.files.items())},
        "state_bytes_per_row": sum(tensor.bytes_per_row() for tensor in engine.state),
        "full_state_bytes_per_row": full_state(engine),
        "tokenizer": engine.tokenizer_file is not None,
        "verifications": [one.model_dump(mode="json") for one in verifications_of(engine)],
        "chat_template": engine.chat_template is not None,
        **{name: manifest[name] for name in ("target", "versions", "checkpoint", "stages")},
    }
