"""Checkpoints of AutoGPTQ, AutoAWQ and compressed-tensors in four bits: values, blocks that are kept, and refusals."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from kvc_trt.cli.main import run
from kvc_trt.errors import InputError
from kvc_trt.graph.weights import EngineWeights, write_weights
from kvc_trt.models.formats import open_checkpoint, read_model_config, weights_of
from kvc_trt.models.quantisation import BlockSource
from kvc_trt.models.sources.hugging_face import parse_config
from kvc_trt.models.sources.int4 import Int4Source, int4_layout
from kvc_trt.models.weights import check_weights, expected_tensors
from tests.models.int4_weights import AWQ_WORD, Int4Checkpoint, words

UP = "model.layers.1.mlp.up_proj.weight"
BASE = UP.removesuffix(".weight")
CASES = {
    "gptq, symmetric": {"method": "gptq"},
    "gptq, zeros": {"method": "gptq", "symmetric": False},
    "gptq, version 2": {"method": "gptq", "symmetric": False, "version": 2},
    "gptq, a group for each row": {"method": "gptq", "group": -1},
    "awq": {"method": "awq", "symmetric": False},
    "awq, groups of 64 in rows of 96": {"method": "awq", "symmetric": False, "group": 64},
    "compressed-tensors": {"method": "compressed-tensors"},
    "compressed-tensors, zeros": {"method": "compressed-tensors", "symmetric": False},
    "compressed-tensors, a scale for each row": {"method": "compressed-tensors", "group": -1},
}
ORDERED = {
    "gptq, channels by activation": {"method": "gptq", "symmetric": False, "shuffled": True},
    "compressed-tensors, channels by activation": {"method": "compressed-tensors", "shuffled": True},
    "groups of 16": {"method": "gptq", "group": 16},
}
"""Layouts whose groups are not whole blocks of an engine."""


def opened(checkpoint: Int4Checkpoint) -> Int4Source:
    return Int4Source(checkpoint, int4_layout(checkpoint.settings, "test"), expected_tensors(checkpoint.config))


@pytest.mark.parametrize("case", [*CASES, *ORDERED])
def test_values_are_those_before_packing(case, tiny_config):
    """In float32 exactly: a difference of four bits times a float16 scale has 16 bits."""
    config = tiny_config()
    checkpoint = Int4Checkpoint(config, **{**CASES, **ORDERED}[case])
    source = opened(checkpoint)
    check_weights(config, source)
    for name, one in checkpoint.matrices.items():
        np.testing.assert_array_equal(source.read(name).astype(np.float64), one.values)
        np.testing.assert_array_equal(source.read_rows(name, 3, 21), source.read(name)[3:21])
        assert source.dtype(name) == "float32"
    np.testing.assert_array_equal(source.read("model.norm.weight"), checkpoint.read("model.norm.weight"))


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_rows_of_one_matrix_read_its_words_once(method, tiny_config, monkeypatch):
    """Its rows lie across all of them, and a build asks for a few rows at a time."""
    checkpoint, reads = Int4Checkpoint(tiny_config(), method), []
    read = checkpoint.read
    monkeypatch.setattr(checkpoint, "read", lambda name: reads.append(name) or read(name))
    source = opened(checkpoint)
    for start in range(0, 96, 16):
        source.read_rows(UP, start, start + 16)
    assert reads.count(f"{BASE}.qweight") == 1


def test_a_word_of_awq_holds_its_columns_in_their_order():
    """The published order: 0x75316420 are the columns 0 to 7."""
    assert words(np.arange(8)[None], AWQ_WORD).view(np.uint32)[0, 0] == 0x75316420
    assert words(np.arange(8)[None]).view(np.uint32)[0, 0] == 0x76543210


@pytest.mark.parametrize("case", CASES)
def test_an_engine_keeps_levels_and_values(case, tmp_path, tiny_config):
    config, path = tiny_config(), tmp_path / "weights.safetensors"
    checkpoint = Int4Checkpoint(config, **CASES[case])
    source = opened(checkpoint)
    assert isinstance(source, BlockSource)
    write_weights(config, source, path, weights="keep", length=8)
    stored = EngineWeights(path)
    for name, one in checkpoint.matrices.items():
        np.testing.assert_array_equal(stored.read(name).astype(np.float64), one.values)
    offsets = [name for name in stored._file.names() if name.endswith(".offsets")]
    assert bool(offsets) == (not checkpoint.symmetric)


@pytest.mark.parametrize("case", ORDERED)
def test_groups_that_are_no_blocks_are_not_kept(case, tmp_path, tiny_config):
    config = tiny_config()
    source = opened(Int4Checkpoint(config, **ORDERED[case]))
    with pytest.raises(InputError, match="groups that are not whole blocks of 32") as caught:
        write_weights(config, source, tmp_path / "weights", weights="keep", length=8)
    assert caught.value.hint == "--weights fp32"


def test_scales_that_float16_does_not_hold_are_not_kept(tmp_path, tiny_config):
    """Those of models in bfloat16 are read exactly, and refused by `keep`."""
    config = tiny_config()
    checkpoint = Int4Checkpoint(config, "compressed-tensors", scale_type=ml_dtypes.bfloat16)
    scales = checkpoint.tensors[f"{BASE}.weight_scale"].astype(np.float32)
    scales[0, 0] = 1e-7
    checkpoint.tensors[f"{BASE}.weight_scale"] = checkpoint.matrices[UP].scales = scales.astype(ml_dtypes.bfloat16)
    source = opened(checkpoint)
    np.testing.assert_array_equal(source.read(UP).astype(np.float64), checkpoint.matrices[UP].values)
    with pytest.raises(InputError, match=r"up_proj\.weight_scale has scales that float16 does not hold"):
        write_weights(config, source, tmp_path / "weights", weights="keep", length=8)


def test_a_bias_of_zeros_that_the_model_does_not_have_is_left_out(tiny_config):
    """Early versions of AutoGPTQ wrote one beside each matrix."""
    zeros, ones = np.zeros(96, np.float16), np.ones(96, np.float16)
    config = tiny_config()
    check_weights(config, opened(Int4Checkpoint(config, "gptq", changes={f"{BASE}.bias": zeros})))
    with pytest.raises(InputError, match=r"up_proj\.bias not part of"):
        check_weights(config, opened(Int4Checkpoint(config, "gptq", changes={f"{BASE}.bias": ones})))


def test_a_bias_of_zeros_that_the_model_has_under_another_name_is_kept(tmp_path, tiny_fields):
    own = {"norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh"}
    fields = tiny_fields(architectures=["Starcoder2ForCausalLM"], **own)
    config = parse_config(fields, "config.json")
    zeros = np.zeros(config.intermediate_size, np.float16)
    checkpoint = Int4Checkpoint(config, "gptq", changes={f"{BASE}.bias": zeros})
    names = {name: name.replace("up_proj", "c_fc").replace("down_proj", "c_proj") for name in checkpoint.names()}
    checkpoint.tensors = {names[name]: tensor for name, tensor in checkpoint.tensors.items()}
    weights = weights_of(open_checkpoint(checkpoint.written(tmp_path, fields)))
    check_weights(config, weights)
    np.testing.assert_array_equal(weights.read(f"{BASE}.bias"), zeros)
    with pytest.raises(InputError, match="a family that neither joins, renames nor reorders its tensors"):
        write_weights(config, weights, tmp_path / "weights", weights="keep", length=8)


FIFTEEN = np.full((2, 12), -1, np.int32)


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("gptq", {f"{BASE}.scales": None}, rf"there is no {BASE}\.scales, which gptq stores beside the levels"),
        ("gptq", {f"{BASE}.qzeros": np.zeros((2, 11), np.int32)}, r"qzeros has shape \[2, 11\], expected \[2, 12\]"),
        ("gptq", {f"{BASE}.qweight": np.zeros((8, 96), np.int64)}, "qweight is int64, expected int32"),
        ("gptq", {f"{BASE}.g_idx": np.full(64, 2, np.int32)}, r"g_idx has group 2, expected 0\.\.1"),
        ("gptq", {f"{BASE}.g_idx": np.array([-1] + [1] * 63, np.int32)}, r"g_idx has group -1, expected 0\.\.1"),
        ("gptq", {f"{BASE}.weight": np.zeros((96, 64), np.float16)}, r"up_proj\.weight and .*\.qweight are one matrix"),
        ("gptq", {f"{BASE}.g_idx": np.zeros(63, np.int32)}, r"g_idx has shape \[63\], expected \[64\]"),
        ("gptq", {f"{BASE}.qzeros": FIFTEEN}, "stored zero 15, which some readers take for 16 and others for 0"),
        ("awq", {f"{BASE}.scales": np.full((2, 96), np.nan, np.float16)}, r"up_proj\.weight: contains NaN"),
        ("compressed-tensors", {f"{BASE}.weight_shape": np.array([96, 60])}, r"weight_shape is \[96, 60\], expected"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_together_are_refused_by_name(method, changes, message, tiny_config):
    with pytest.raises(InputError, match=message) as caught:
        opened(Int4Checkpoint(tiny_config(), method, changes=changes)).read(UP)
    assert caught.value.exit_code == 2


def test_a_matrix_without_the_zeros_that_config_names_is_refused(tiny_config):
    """Its zeros are not 8."""
    checkpoint = Int4Checkpoint(
        tiny_config(), "compressed-tensors", symmetric=False, changes={f"{BASE}.weight_zero_point": None}
    )
    with pytest.raises(InputError, match=r"there is no .*up_proj\.weight_zero_point"):
        opened(checkpoint)


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_groups_longer_than_a_row_are_one_group(method, tiny_config):
    """However large the number is."""
    checkpoint = Int4Checkpoint(tiny_config(), method, group=-1)
    if method == "gptq":
        checkpoint.tensors = {name: one for name, one in checkpoint.tensors.items() if not name.endswith(".g_idx")}
    layout = replace(int4_layout(checkpoint.settings, "test"), group_size=1 << 70)
    source = Int4Source(checkpoint, layout, expected_tensors(checkpoint.config))
    np.testing.assert_array_equal(source.read(UP).astype(np.float64), checkpoint.matrices[UP].values)


@pytest.mark.parametrize(
    ("order", "anywhere"),
    [("group", True), ("dynamic", True), (True, True), ("weight", False), ("static", False), (False, False)],
)
def test_orders_by_activation_have_the_names_of_compressed_tensors(order, anywhere, tiny_config):
    given = Int4Checkpoint(tiny_config(), "compressed-tensors").settings
    given["config_groups"]["group_0"]["weights"]["actorder"] = order
    assert int4_layout(given, "test").by_activation is anywhere


def settings(method, **changes):
    return {"quant_method": method, "bits": 4, "group_size": 128, **changes}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (settings("gptq", bits=3), "bits: .*4, found 3"),
        (settings("gptq", checkpoint_format="marlin"), "checkpoint_format: .*'gptq' or 'gptq_v2', found 'marlin'"),
        (settings("gptq", group_size=0), "group_size is 0, expected channels, or -1"),
        (settings("awq", version="gemv"), "version: .*found 'gemv'"),
        (settings("awq", transform_config={"config_groups": {"u": {}}}), "transform_config is .*, expected none"),
        ({"quant_method": "bitsandbytes"}, "quant_method: .*'gptq'.* found 'bitsandbytes'"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24",
             "config_groups": {"g": {"weights": {"type": "int", "num_bits": 4, "strategy": "channel"}}}},
            "format: .*'pack-quantized', found 'marlin-24'",
        ),
    ],
)  # fmt: skip
def test_settings_of_other_layouts_are_refused(given, message, tiny_config):
    with pytest.raises(InputError, match=message):
        tiny_config(quantization_config=given)


def test_packed_tensors_without_settings_are_refused(tmp_path, tiny_config, tiny_fields):
    directory = Int4Checkpoint(tiny_config(), "gptq").written(tmp_path, tiny_fields())
    (directory / "config.json").write_text((directory / "config.json").read_text().replace("quantization_config", "_"))
    with pytest.raises(InputError, match="names no layout of four bits"):
        weights_of(open_checkpoint(directory))


@pytest.mark.parametrize(
    ("case", "dtype", "kept"),
    [
        ("gptq, zeros", "float16", True),
        ("gptq, zeros", "bfloat16", False),
        ("gptq, channels by activation", "float16", False),
        ("groups of 16", "float16", False),
    ],
)
def test_blocks_are_kept_by_default_where_an_engine_holds_them(case, dtype, kept, tmp_path, tiny_config, tiny_fields):
    checkpoint = Int4Checkpoint(tiny_config(), **{**CASES, **ORDERED}[case])
    assert read_model_config(checkpoint.written(tmp_path, tiny_fields(torch_dtype=dtype)))[1] == kept


EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "own"),
    [("Phi3ForCausalLM", {}), ("Qwen2MoeForCausalLM", EXPERTS), ("Qwen3MoeForCausalLM", EXPERTS)],
)
def test_families_whose_tensors_are_moved_or_stacked_are_widened_by_default(
    architecture, own, tmp_path, tiny_config, tiny_fields
):
    checkpoint = Int4Checkpoint(tiny_config(), "gptq")
    fields = tiny_fields(torch_dtype="float16", architectures=[architecture], **own)
    assert read_model_config(checkpoint.written(tmp_path, fields))[1] is False


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "weights"),
    [
        ("gptq, zeros", "keep"),
        ("awq", "keep"),
        ("gptq, channels by activation", "fp32"),
        ("compressed-tensors", "fp32"),
    ],
)
def test_an_engine_of_such_a_checkpoint_is_built_and_verified(case, weights, tmp_path, tiny_config, tiny_fields, capfd):
    """`auto` keeps what an engine can hold, and otherwise says what it widens."""
    checkpoint = Int4Checkpoint(tiny_config(), **{**CASES, **ORDERED}[case])
    dtype = "bfloat16" if case == "compressed-tensors" else "float16"
    model, engine = checkpoint.written(tmp_path / "model", tiny_fields(torch_dtype=dtype)), tmp_path / "engine"
    lengths = ["--token-budget", "32", "--max-input-len", "128", "--max-output-len", "16", "--no-verify"]
    assert run(["build", "--model", str(model), "--backend", "onnxruntime", *lengths, "-o", str(engine)]) == 0
    said = capfd.readouterr().err
    assert ("own blocks (keep)" in said) == (weights == "keep")
    assert ("matrices in int4 are dequantised for fp32" in said) == (weights == "fp32")
    stored = EngineWeights(engine / "weights.safetensors")
    for name, one in checkpoint.matrices.items():
        np.testing.assert_array_equal(stored.read(name).astype(np.float64), one.values)
    assert run(["verify", str(engine), "--level", "logits"]) == 0
