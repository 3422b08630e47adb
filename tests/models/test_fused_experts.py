"""Experts of gpt-oss as checkpoints store them: in floats, and in MXFP4 in the published layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvc_trt.errors import InputError
from kvc_trt.models.formats import open_checkpoint, weights_of
from kvc_trt.models.sources.hugging_face import parse_config
from kvc_trt.models.weights import EXPERT_BIASES, EXPERT_MATRICES, ROUTER_BIAS, SINKS, WeightSource, check_weights
from tests.oracles.family_models import written

MODEL, EXPERTS, HIDDEN, INNER = "gpt-oss", 6, 64, 96
LAYER = "model.layers.1"
MATRICES = {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
Change = Callable[[dict[str, torch.Tensor]], None]


def in_floats(path: Path) -> dict[str, torch.Tensor]:
    """Write the checkpoint as transformers does; return its tensors."""
    from safetensors.torch import load_file

    written(MODEL, path)
    return load_file(path / "model.safetensors")


def in_mxfp4(path: Path, change: Change = lambda tensors: None) -> dict[str, torch.Tensor]:
    """Write the same checkpoint with random blocks; return the experts that transformers makes of them."""
    from safetensors.torch import save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, generator, expected = in_floats(path), torch.Generator().manual_seed(3), {}
    for layer in range(4):
        for name, (rows, columns) in MATRICES.items():
            base = f"model.layers.{layer}.mlp.experts.{name}"
            blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), generator=generator).to(torch.uint8)
            scales = torch.randint(119, 127, (EXPERTS, rows, columns // 32), generator=generator).to(torch.uint8)
            del tensors[base]
            tensors |= {f"{base}_blocks": blocks, f"{base}_scales": scales}
            expected[base] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
    return expected


def source_of(path: Path) -> WeightSource:
    checkpoint = open_checkpoint(path)
    source = weights_of(checkpoint)
    check_weights(checkpoint.config, source)
    return source


def as_ours(stored: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return the three matrices of all experts of a layer, of tensors [experts,in,out] whose gate and up alternate."""
    gate_up, down = (stored[f"{LAYER}.mlp.experts.{name}"].transpose(1, 2) for name in MATRICES)
    parts = gate_up[:, 0::2], gate_up[:, 1::2], down
    return dict(zip(EXPERT_MATRICES, (part.flatten(0, 1).numpy() for part in parts), strict=True))


def test_floats_are_read_by_projections(tmp_path: Path) -> None:
    stored = in_floats(tmp_path)
    source = source_of(tmp_path)
    for name, expected in as_ours(stored).items():
        np.testing.assert_array_equal(source.read(f"{LAYER}.{name}"), expected)
    gate, up, down = (source.read(f"{LAYER}.{name}") for name in EXPERT_BIASES)
    biases = stored[f"{LAYER}.mlp.experts.gate_up_proj_bias"]
    np.testing.assert_array_equal(gate, biases[:, 0::2].flatten())
    np.testing.assert_array_equal(up, biases[:, 1::2].flatten())
    np.testing.assert_array_equal(down, stored[f"{LAYER}.mlp.experts.down_proj_bias"].flatten())
    np.testing.assert_array_equal(source.read(f"{LAYER}.{ROUTER_BIAS}"), stored[f"{LAYER}.mlp.router.bias"])
    np.testing.assert_array_equal(source.read(f"{LAYER}.{SINKS}"), stored[f"{LAYER}.self_attn.sinks"])


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """However rows are cut: within an expert, and across several."""
    expected, source = as_ours(in_mxfp4(tmp_path)), source_of(tmp_path)
    for name, matrix in expected.items():
        full = f"{LAYER}.{name}"
        np.testing.assert_array_equal(source.read(full), matrix)
        for start, stop in ((0, 1), (5, 17), (60, 200), (len(matrix) - 1, len(matrix)), (7, 7)):
            np.testing.assert_array_equal(source.read_rows(full, start, stop), matrix[start:stop])
        assert source.dtype(full) == "float32"


def test_bfloat16_holds_mxfp4_exactly(tmp_path: Path) -> None:
    """So an engine in bf16 has the checkpoint's numbers."""
    in_mxfp4(tmp_path)
    matrix = torch.from_numpy(source_of(tmp_path).read(f"{LAYER}.{EXPERT_MATRICES[0]}"))
    assert torch.equal(matrix.bfloat16().float(), matrix)


def nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.mlp.experts.down_proj_scales"][2, 3, 1] = 255


def wide(tensors: dict[str, torch.Tensor]) -> None:
    name = f"{LAYER}.mlp.experts.gate_up_proj_blocks"
    tensors[name] = torch.cat([tensors[name], tensors[name]], dim=2)


def signed(tensors: dict[str, torch.Tensor]) -> None:
    name = f"{LAYER}.mlp.experts.gate_up_proj_scales"
    tensors[name] = tensors[name].to(torch.int8)


def lost(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{LAYER}.mlp.experts.down_proj_scales"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (nan, "down_proj_scales: contains NaN weights"),
        (wide, r"gate_up_proj_blocks has shape \[6, 192, 4, 16\], expected \[6, 192, 2, 16\]"),
        (signed, "gate_up_proj_scales is int8, expected uint8"),
        (lost, "mlp.experts.down_proj.weight missing"),
    ],
)
def test_damaged_expert_tensors_are_refused_by_name(change: Change, words: str, tmp_path: Path) -> None:
    in_mxfp4(tmp_path, change)
    with pytest.raises(InputError, match=words):
        source_of(tmp_path).read(f"{LAYER}.{EXPERT_MATRICES[2]}")


def test_other_families_have_no_mxfp4() -> None:
    fields: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64}
    fields |= {"intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "rms_norm_eps": 1e-5}
    fields |= {"max_position_embeddings": 64, "quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(InputError, match="quant_method is 'mxfp4', expected another for LlamaForCausalLM"):
        parse_config(fields, "config.json")


def test_an_absent_rotation_is_refused() -> None:
    fields: dict[str, Any] = {"architectures": ["GptOssForCausalLM"], "vocab_size": 64, "hidden_size": 64}
    fields |= {"intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 8, "num_local_experts": 4}
    fields |= {"max_position_embeddings": 64}
    with pytest.raises(InputError, match="rope_scaling is absent, expected it, or rope_parameters"):
        parse_config(fields, "config.json")
