from __future__ import annotations

import numpy as np
import pytest

from kvc_trt.errors import InputError
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.models.weights import check_weights, count_parameters, expected_tensors, row_chunks


class Altered:
    """Random weights with a false list of tensors."""

    def __init__(self, config, add=None, drop=(), dtype="float32"):
        self._shapes = {k: v for k, v in (expected_tensors(config) | (add or {})).items() if k not in drop}
        self._dtype = dtype

    def names(self):
        return list(self._shapes)

    def shape(self, name):
        return self._shapes[name]

    def dtype(self, name):
        return self._dtype


def test_expected_tensors_of_llama_have_their_names_and_shapes(tiny_config):
    expected = expected_tensors(tiny_config())
    assert next(iter(expected)) == "model.embed_tokens.weight"
    assert list(expected)[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert expected["model.layers.1.self_attn.k_proj.weight"] == (32, 64)
    assert expected["model.layers.0.mlp.down_proj.weight"] == (64, 96)
    assert len(expected) == 3 + 2 * 9
    assert "lm_head.weight" not in expected_tensors(tiny_config(tie_word_embeddings=True))


def test_expected_tensors_of_qwen_have_their_biases_and_norms(tiny_config):
    qwen2 = expected_tensors(tiny_config(architectures=["Qwen2ForCausalLM"]))
    assert qwen2["model.layers.0.self_attn.q_proj.bias"] == (64,)
    assert qwen2["model.layers.0.self_attn.v_proj.bias"] == (32,)
    assert "model.layers.0.self_attn.o_proj.bias" not in qwen2
    qwen3 = expected_tensors(tiny_config(architectures=["Qwen3ForCausalLM"], head_dim=32))
    assert qwen3["model.layers.0.self_attn.k_norm.weight"] == (32,)
    assert qwen3["model.layers.0.self_attn.q_proj.weight"] == (128, 64)
    biased = expected_tensors(tiny_config(attention_bias=True))
    assert biased["model.layers.1.self_attn.o_proj.bias"] == (64,)


def test_parameters_are_counted_once(tiny_config):
    untied = sum(int(np.prod(shape)) for shape in expected_tensors(tiny_config()).values())
    assert count_parameters(tiny_config()) == untied
    assert count_parameters(tiny_config(tie_word_embeddings=True)) == untied - 50 * 64


def test_complete_weights_pass_the_check(tiny_config):
    check_weights(tiny_config(), RandomWeights(tiny_config(), 0))


@pytest.mark.parametrize("extra", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"])
def test_tensors_implied_by_the_configuration_are_ignored(tiny_config, extra):
    check_weights(tiny_config(), Altered(tiny_config(), add={extra: (8,)}))


def test_a_copy_of_a_tied_head_is_ignored_and_an_untied_one_is_not_missed(tiny_config):
    tied = tiny_config(tie_word_embeddings=True)
    check_weights(tied, Altered(tied, add={"lm_head.weight": (50, 64)}))
    with pytest.raises(InputError, match=r"lm_head\.weight missing"):
        check_weights(tiny_config(), Altered(tied))


@pytest.mark.parametrize(
    ("alteration", "words"),
    [
        ({"drop": ("model.norm.weight",)}, r"model\.norm\.weight missing"),
        ({"drop": tuple(f"model.layers.1.mlp.{n}_proj.weight" for n in ("gate", "up", "down"))}, "missing"),
        ({"add": {"model.layers.2.input_layernorm.weight": (64,)}}, r"layers\.2\.input_layernorm\.weight not part"),
        ({"add": {"model.layers.0.self_attn.q_proj.bias": (64,)}}, r"q_proj\.bias not part"),
        ({"add": {"model.norm.weight": (65,)}}, r"model\.norm\.weight has shape \[65\], expected \[64\]"),
        ({"add": {"lm_head.weight": (64, 50)}}, "has shape"),
        ({"dtype": "float64"}, "is float64"),
        ({"dtype": "int8"}, "is int8"),
    ],
)
def test_wrong_weights_are_refused_by_name(tiny_config, alteration, words):
    with pytest.raises(InputError, match=words):
        check_weights(tiny_config(), Altered(tiny_config(), **alteration))


def test_long_lists_of_missing_tensors_are_cut(tiny_config):
    empty = Altered(tiny_config(), drop=tuple(expected_tensors(tiny_config())))
    with pytest.raises(InputError, match="and 18 more missing"):
        check_weights(tiny_config(), empty)


@pytest.mark.parametrize("shape", [(7, 3), (1, 100), (100,), (5, 0)])
def test_chunks_cover_every_row_once(shape):
    covered = [row for start, stop in row_chunks(shape, 6) for row in range(start, stop)]
    assert covered == list(range(shape[0]))
