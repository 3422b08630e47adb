"""`kvc-trt models`: the presets."""

from __future__ import annotations

from typing import Any

import click

from kvc_trt.cli.text import printing
from kvc_trt.models.presets import list_presets, load_preset
from kvc_trt.models.weights import count_parameters
from kvc_trt.policies import DEFAULT
from kvc_trt.tables import text_table


@click.command()
@printing.json_option
def command(as_json: bool) -> None:
    """List the model presets; --model also takes any checkpoint of a supported architecture."""
    presets = [_preset(name) for name in _names()]
    if as_json:
        printing.print_json({"models": presets})
        return
    headers = ("name", "architecture", "layers", "heads", "KV heads", "positions", "weights")
    keys = ("name", "architecture", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    rows = [
        [printing.number(preset[key]) for key in (*keys, "max_position_embeddings")]
        + [preset["hugging_face_id"] or preset["package"] or "shipped"]
        for preset in presets
    ]
    printing.show(text_table(headers, rows, right=(2, 3, 4, 5)))


def _names() -> list[str]:
    return list_presets()


def _preset(name: str) -> dict[str, Any]:
    preset = load_preset(name)
    config = preset.config
    return {
        "name": name,
        "description": preset.description,
        "architecture": config.architecture,
        "hugging_face_id": preset.hugging_face_id,
        "revision": preset.revision,
        "package": None if preset.file is None else preset.file.package,
        "parameters": count_parameters(config),
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_size": config.head_size,
        "max_position_embeddings": config.max_position_embeddings,
        "sliding_window": config.sliding_window,
        "layer_windows": config.windows(config.max_position_embeddings),
        "default_policy": DEFAULT if preset.recommended is None else preset.recommended.policy,
        "defaults": dict(preset.defaults),
    }
