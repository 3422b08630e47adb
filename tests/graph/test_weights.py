from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from kvc_trt.errors import InputError
from kvc_trt.graph.weights import EMBEDDING, HEAD, PRECISIONS, EngineWeights, GraphWeights, write_weights
from kvc_trt.models.quantisation import dequantise, quantise
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.models.rope import rotary_tables
from kvc_trt.models.sources.safetensors_file import SafetensorsFile
from kvc_trt.models.weights import check_weights, expected_tensors
from tests.graph.small_models import FAMILIES, LLAMA
from tests.models.fp8_weights import fp8_source

QUERY = "model.layers.1.self_attn.q_proj.weight"


class Altered(RandomWeights):
    """Random weights with one value of one tensor replaced."""

    def __init__(self, config, name, value):
        super().__init__(config, 0)
        self.name, self.value = name, value

    def read_rows(self, name, start, stop):
        rows = super().read_rows(name, start, stop)
        if name == self.name and start == 0:
            rows.reshape(-1)[5] = self.value
        return rows

    def read(self, name):
        return self.read_rows(name, 0, self.shape(name)[0])


def written(directory, model=LLAMA, weights="fp32", source=None, progress=None):
    path = directory / "weights.safetensors"
    source = source or RandomWeights(model, 0)
    write_weights(model, source, path, weights=weights, length=300, progress=progress)
    return path


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", [kind for kind in PRECISIONS if kind != "fp8"])
def test_a_weight_file_reads_back_as_a_complete_source(tmp_path, family, precision):
    model = FAMILIES[family]
    source, stored = RandomWeights(model, 0), EngineWeights(written(tmp_path, model, precision))
    check_weights(model, stored)
    for name in expected_tensors(model):
        values = stored.read(name).astype(np.float32)
        assert values.shape == stored.shape(name) == source.shape(name)
        assert str(stored.read(name).dtype) == stored.dtype(name)
        error = np.abs(values - source.read(name)).max() / np.abs(source.read(name)).max()
        assert error <= {"fp32": 0, "fp16": 1e-3, "bf16": 1e-2, "int8": 1e-2, "int4": 0.15}[precision]


def test_matrices_in_fp8_are_kept_as_they_are_and_read_as_they_are_multiplied(tmp_path):
    source = fp8_source(LLAMA, wide="layers.0.*q_proj")
    path = written(tmp_path, weights="fp8", source=source)
    stored, raw = EngineWeights(path), SafetensorsFile(path)
    check_weights(LLAMA, stored)
    assert raw.entries[QUERY].dtype == "float8_e4m3fn"
    np.testing.assert_array_equal(raw.read(QUERY), source.read_fp8_rows(QUERY, 0, 64))
    np.testing.assert_array_equal(raw.read(f"{QUERY}.scales"), source.row_scales(QUERY))
    for name in expected_tensors(LLAMA):
        values = stored.read(name)
        assert str(values.dtype) == stored.dtype(name) == "bfloat16"
        np.testing.assert_array_equal(values, source.read(name).astype(ml_dtypes.bfloat16))


def test_matrices_in_fp8_that_share_an_input_touch(tmp_path):
    weights = GraphWeights(written(tmp_path, weights="fp8", source=fp8_source(LLAMA)))
    parts = [QUERY.replace("q_proj", f"{kind}_proj") for kind in "qkv"]
    assert weights.joined("qkv", parts).shape == (128, 64)
    assert weights.joined("qkv.scales", [f"{part}.scales" for part in parts]).shape == (128,)


def test_fp8_is_not_made_of_other_weights(tmp_path):
    with pytest.raises(InputError, match="--weights fp8: the checkpoint has no matrix in fp8"):
        written(tmp_path, weights="fp8")


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8"])
def test_other_kinds_of_weights_are_made_of_fp8(tmp_path, precision):
    source = fp8_source(LLAMA)
    stored = EngineWeights(written(tmp_path, weights=precision, source=source))
    exact = source.read(QUERY)
    error = np.abs(stored.read(QUERY).astype(np.float32) - exact).max() / np.abs(exact).max()
    assert error <= {"fp32": 0, "fp16": 1e-3, "bf16": 1e-2, "int8": 1e-2}[precision]


def test_quantised_matrices_are_exactly_what_the_kernel_computes_with(tmp_path):
    stored = EngineWeights(written(tmp_path, weights="int4"))
    exact = dequantise(*quantise(RandomWeights(LLAMA, 0).read(QUERY), 4), 4)
    np.testing.assert_array_equal(stored.read(QUERY), exact)
    np.testing.assert_array_equal(stored.read_rows(QUERY, 3, 9), exact[3:9])


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_a_tied_head_is_its_embedding_stored_once(tmp_path, precision):
    tied = FAMILIES["qwen2"]
    assert HEAD not in EngineWeights(written(tmp_path, tied, precision)).names()


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_quantised_embedding_has_eight_bits(tmp_path, precision):
    stored = EngineWeights(written(tmp_path, weights=precision))
    exact = dequantise(*quantise(RandomWeights(LLAMA, 0).read(EMBEDDING), 8), 8)
    np.testing.assert_array_equal(stored.read(EMBEDDING), exact)


def test_bfloat16_stays_bfloat16(tmp_path):
    assert EngineWeights(written(tmp_path, weights="bf16")).read(QUERY).dtype == ml_dtypes.bfloat16


def test_rotary_tables_lie_beside_the_weights(tmp_path):
    file = SafetensorsFile(written(tmp_path, FAMILIES["llama3.1"]))
    for name, table in zip(("rotary.cos", "rotary.sin"), rotary_tables(FAMILIES["llama3.1"], 300), strict=True):
        np.testing.assert_array_equal(file.read(name), table)


@pytest.mark.parametrize("weights", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [QUERY, EMBEDDING, "model.norm.weight"])
def test_nan_and_infinite_weights_are_refused_by_name(tmp_path, weights, value, name):
    with pytest.raises(InputError, match=name):
        written(tmp_path, weights=weights, source=Altered(LLAMA, name, value))


def test_a_weight_that_half_precision_cannot_hold_is_refused(tmp_path):
    source = Altered(LLAMA, QUERY, 70000.0)
    with pytest.raises(InputError, match=rf"{QUERY}.*range of float16; the first of 1 is 70000 at \[\d+, \d+\]"):
        written(tmp_path, weights="fp16", source=source)
    written(tmp_path, weights="bf16", source=source)


def test_matrices_that_blocks_do_not_divide_are_refused(tmp_path):
    with pytest.raises(InputError, match="multiple of 32"):
        written(tmp_path, replace(LLAMA, intermediate_size=80), "int4")


def test_an_unknown_precision_is_refused(tmp_path):
    with pytest.raises(InputError, match="int3"):
        written(tmp_path, weights="int3")


def test_projections_of_one_input_are_one_matrix_to_a_graph(tmp_path):
    weights = GraphWeights(written(tmp_path))
    names = [f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qkv"]
    joined = weights.joined("qkv", names)
    assert joined is not None
    assert joined.shape == (128, 64)
    data = np.fromfile(tmp_path / "weights.safetensors", np.float32, joined.nbytes // 4, offset=joined.offset)
    source = RandomWeights(LLAMA, 0)
    np.testing.assert_array_equal(data.reshape(joined.shape), np.concatenate([source.read(name) for name in names]))
    assert weights.joined("apart", [names[0], names[2]]) is None


def test_progress_counts_every_byte(tmp_path):
    class Counting:
        def task(self, description, total):
            self.total, self.done = total, 0
            return self

        def __enter__(self):
            return self.advance

        def __exit__(self, *failure):
            return None

        def advance(self, amount):
            self.done += amount

    progress = Counting()
    written(tmp_path, weights="int4", progress=progress)
    assert progress.done == progress.total > 0
