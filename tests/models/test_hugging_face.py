from __future__ import annotations

import json
import math
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.models.config import RopeScaling, Yarn
from kvc_trt.models.sources.hugging_face import parse_config, read_config
from tests.conftest import TINY_MODEL

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_a_plain_llama_has_transformers_defaults(tiny_config):
    config = tiny_config()
    assert (config.head_size, config.group_size) == (16, 2)
    assert (config.dtype, config.tie_word_embeddings, config.sliding_window) == ("float32", False, None)
    assert (config.qkv_bias, config.output_bias, config.qk_norm) == (False, False, False)
    assert config.rotary_scaling is None
    assert config.eos_token_ids == (2,)
    assert tiny_config(num_key_value_heads=None).num_key_value_heads == 4
    assert tiny_config(head_dim=32).head_size == 32


@pytest.mark.parametrize(("architecture", "kv_heads"), [("Mistral", 8), ("Qwen2", 32), ("Qwen3", 32), ("Llama", 64)])
def test_kv_heads_that_are_not_given_are_those_of_transformers(tiny_config, architecture, kv_heads):
    """The class's own default where the field is absent, all heads where it is null."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes = {**TINY_MODEL, "num_attention_heads": 64, "hidden_size": 64 * 16, "head_dim": 16}
    del sizes["num_key_value_heads"]
    found = parse_config({**sizes, "architectures": [f"{architecture}ForCausalLM"]}, "it")
    assert found.num_key_value_heads == kv_heads
    assert CONFIG_MAPPING[architecture.lower()].from_dict(sizes).num_key_value_heads == kv_heads
    given_null = {**sizes, "architectures": [f"{architecture}ForCausalLM"], "num_key_value_heads": None}
    assert parse_config(given_null, "it").num_key_value_heads == 64


def test_the_head_size_of_qwen3_that_is_not_given_is_that_of_transformers():
    sizes = {name: value for name, value in TINY_MODEL.items() if name != "head_dim"}
    assert parse_config({**sizes, "architectures": ["Qwen3ForCausalLM"]}, "it").head_size == 128
    assert parse_config({**sizes, "architectures": ["Qwen2ForCausalLM"]}, "it").head_size == 16


def test_families_have_their_biases_norms_and_windows(tiny_config):
    qwen2 = tiny_config(architectures=["Qwen2ForCausalLM"], use_sliding_window=False, sliding_window=128)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.sliding_window) == (True, False, None)
    qwen3 = tiny_config(architectures=["Qwen3ForCausalLM"], head_dim=32)
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.head_size) == (True, False, 32)
    assert tiny_config(architectures=["Qwen3ForCausalLM"], attention_bias=True).output_bias
    biased = tiny_config(attention_bias=True)
    assert (biased.qkv_bias, biased.output_bias) == (True, True)


def test_sliding_windows_follow_each_familys_rule(tiny_config, tiny_fields):
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert tiny_config(**mistral, sliding_window=None).sliding_window is None
    assert tiny_config(**mistral, sliding_window=64).sliding_window == 64
    assert tiny_config(**mistral).sliding_window == 4096  # an absent field is Mistral's default, not "none"
    with pytest.raises(InputError, match="sliding_window is 64, expected null for LlamaForCausalLM"):
        tiny_config(sliding_window=64)
    for name in ("Qwen2", "Qwen3"):
        qwen = {"architectures": [f"{name}ForCausalLM"], "use_sliding_window": True}
        assert tiny_config(**qwen, max_window_layers=0).sliding_window == 4096
        assert tiny_config(**qwen, max_window_layers=0, sliding_window=64).sliding_window == 64
        assert tiny_config(**qwen, sliding_window=64).windows(256) is None  # the first 28 layers have none
        assert tiny_config(**qwen, sliding_window=64, max_window_layers=1).windows(256) == (0, 64)
        listed = ["sliding_attention", "full_attention"]
        assert tiny_config(**qwen, sliding_window=64, layer_types=listed).windows(256) == (64, 0)
        with pytest.raises(InputError, match="layer_types has 1 names, expected one for each of 2 layers"):
            tiny_config(**qwen, layer_types=listed[:1])


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, None),
        ({"type": "default"}, None),
        ({"type": "linear", "factor": 8.0}, RopeScaling("linear", 8.0)),
        ({"rope_type": "linear", "factor": 8}, RopeScaling("linear", 8.0)),
        (LLAMA3, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)),
    ],
)
def test_old_and_new_rotary_settings_agree(tiny_config, tiny_fields, scaling, expected):
    old = tiny_config(rope_theta=500000.0, rope_scaling=scaling)
    assert old.rotary_scaling == expected
    settings_ = {name: value for name, value in (scaling or {}).items() if name != "type"}
    settings_.setdefault("rope_type", (scaling or {}).get("type", "default"))
    new = parse_config(tiny_fields(absent="rope_theta", rope_parameters={"rope_theta": 500000.0} | settings_), "test")
    assert new == old


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_a_base_beside_the_scaling_counts_as_in_transformers(tiny_fields, name):
    from transformers import LlamaConfig

    fields = tiny_fields(rope_theta=1e4, **{name: {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}})
    theirs = LlamaConfig.from_dict(fields).rope_parameters["rope_theta"]
    assert parse_config(fields, "it").rotary_base == theirs == 5e5


def test_a_stretched_length_is_read(tiny_config):
    """Vicuna 16K: max_position_embeddings is the original one, max_sequence_length what it was tuned for."""
    config = tiny_config(max_sequence_length=1024, rope_scaling={"type": "linear", "factor": 4.0})
    assert config.max_position_embeddings == 1024


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("architectures", v) for v in (["GPT2LMHeadModel"], [], "LlamaForCausalLM", ["LlamaForCausalLM"] * 2, [3])],
        *[("hidden_size", v) for v in (0, -1, 64.0, "64", True, 1 << 40, [64], 65)],
        *[("intermediate_size", v) for v in (0, -5, 1e3, 1 << 40)],
        *[("num_hidden_layers", v) for v in (0, -1, 2.0, False, 10**9)],
        *[("num_attention_heads", v) for v in (0, -4, 3, 10**6)],
        *[("num_key_value_heads", v) for v in (0, -2, 3, 8, "2")],
        *[("head_dim", v) for v in (0, -16, 15, 16.0, 1 << 20)],
        *[("vocab_size", v) for v in (0, -1, 1 << 40, "50")],
        *[("rms_norm_eps", v) for v in (0, -1e-5, 1, math.nan, math.inf, "1e-5", None, True)],
        *[("max_position_embeddings", v) for v in (0, -1, 1e6, 1 << 50)],
        *[("rope_theta", v) for v in (0, -1.0, math.nan, math.inf, "10000", 1e30)],
        *[("torch_dtype", v) for v in ("float64", "int8", 3, "auto")],
        ("dtype", "float8"),
        *[("tie_word_embeddings", v) for v in (1, "true", 0)],
        *[("eos_token_id", v) for v in (50, -1, "2", [2, 50], 2.0, [[2]], list(range(50)) * 2, True)],
        *[("bos_token_id", v) for v in (50, -1, "1")],
        ("hidden_act", "gelu"),
        ("mlp_bias", 1),
        ("attention_bias", "yes"),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"quant_method": "gptq"}),
        *[("rope_scaling", v) for v in ("linear", 8, [], {"type": "longrope", "factor": 4.0}, {"type": "linear"})],
        *[("rope_scaling", {"type": "linear", "factor": v}) for v in (0, -8, 0.5, "8", math.nan, 1e9)],
        *[("rope_scaling", LLAMA3 | c) for c in ({"low_freq_factor": 4.0}, {"high_freq_factor": 0}, {"factor": None})],
        ("rope_scaling", LLAMA3 | {"original_max_position_embeddings": 8192.5}),
        *[("rope_scaling", YARN | c) for c in ({"factor": 0.5}, {"beta_fast": 1.0}, {"truncate": 1}, {"mscale": -1})],
        ("rope_scaling", {"type": "yarn", "original_max_position_embeddings": 1 << 20}),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}, "rope_type": "longrope"}),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.25}),
    ],
)
def test_wrong_fields_are_refused_by_name(tiny_fields, field, value):
    with pytest.raises(InputError) as caught:
        parse_config(tiny_fields(**{field: value}), "SOURCE")
    message = caught.value.message
    assert message.startswith("SOURCE: ")
    assert field in message or isinstance(value, dict) or field.startswith("num_")
    assert "\n" not in message
    assert len(message) < 300


def test_yarn_of_a_base_without_a_logarithm_is_refused(tiny_fields):
    with pytest.raises(InputError, match="rope_theta is 1, expected more than 1 with yarn"):
        parse_config(tiny_fields(rope_theta=1, rope_scaling=YARN), "SOURCE")


def test_two_spellings_of_the_rotary_settings_must_agree(tiny_fields):
    """A file of `transformers` 5 has rope_parameters; model cards tell you to add rope_scaling."""
    default = {"rope_type": "default", "rope_theta": 5e5}
    with pytest.raises(InputError, match="rope_scaling says something else than rope_parameters"):
        parse_config(tiny_fields(rope_parameters=default, rope_scaling=YARN), "SOURCE")
    with pytest.raises(InputError, match="rope_scaling says something else than rope_parameters"):
        parse_config(
            tiny_fields(rope_parameters=default, rope_scaling={"type": "default", "rope_theta": 1e6}), "SOURCE"
        )
    alike = parse_config(tiny_fields(rope_parameters=YARN | {"rope_theta": 5e5}, rope_scaling=YARN), "SOURCE")
    assert (alike.rotary_base, alike.rotary_scaling) == (5e5, Yarn(4.0, 64, 0.1 * math.log(4.0) + 1))


@pytest.mark.parametrize(
    "field",
    ["architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
     "rms_norm_eps", "max_position_embeddings"],
)  # fmt: skip
def test_missing_fields_are_named(tiny_fields, field):
    with pytest.raises(InputError, match=f"missing key '{field}'"):
        parse_config(tiny_fields(absent=field), "SOURCE")


def test_unknown_names_list_what_is_supported(tiny_fields):
    with pytest.raises(InputError, match=r"\['BloomForCausalLM'\], expected one of \d+ classes") as raised:
        parse_config(tiny_fields(architectures=["BloomForCausalLM"]), "x")
    assert "ForCausalLM behind one of" in raised.value.hint
    assert "Qwen3," in raised.value.hint
    with pytest.raises(InputError, match="llama3"):
        parse_config(tiny_fields(rope_scaling={"rope_type": "proportional", "factor": 4.0}), "x")
    with pytest.raises(InputError, match="unknown key 'low_freq_facto'"):
        parse_config(tiny_fields(rope_scaling=LLAMA3 | {"low_freq_facto": 1.0}), "x")
    with pytest.raises(InputError, match="silu"):
        parse_config(tiny_fields(hidden_act="relu"), "x")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_theta",
    "rope_scaling", "rope_parameters", "torch_dtype", "dtype", "eos_token_id", "bos_token_id", "sliding_window",
    "use_sliding_window", "attention_bias", "tie_word_embeddings", "hidden_act", "mlp_bias",
]  # fmt: skip


@given(st.dictionaries(st.sampled_from(FIELDS), ANYTHING, min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_random_values_in_config_json_are_read_or_refused(changes):
    plain = {
        "architectures": ["MistralForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 50, "rms_norm_eps": 1e-5, "max_position_embeddings": 256,
    }  # fmt: skip
    try:
        config = parse_config(plain | changes, "x")
    except InputError:
        return
    assert config.hidden_size > 0
    assert config.head_size % 2 == 0
    assert config.num_attention_heads % config.num_key_value_heads == 0
    hash(config)


def test_end_tokens_of_the_generation_config_are_added(tmp_path, tiny_fields):
    (tmp_path / "config.json").write_text(json.dumps(tiny_fields()))
    assert read_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2, 9]}')
    assert read_config(tmp_path).eos_token_ids == (2, 7, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": {"x": []}}')
    with pytest.raises(InputError, match="eos_token_id"):
        read_config(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'"text"', b" " * (1 << 21)])
def test_a_broken_file_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_pipe_in_place_of_a_config_is_refused_without_waiting(tmp_path, tiny_fields, name):
    (tmp_path / "config.json").write_text(json.dumps(tiny_fields()))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    if name == "config.json":
        with pytest.raises(InputError, match="a pipe; expected a regular file"):
            read_config(tmp_path)
    else:
        assert read_config(tmp_path).hidden_size


def test_an_integer_too_long_to_print_is_refused(tiny_fields):
    with pytest.raises(InputError, match=r"hidden_size: .*, found a int that cannot be printed"):
        parse_config(tiny_fields(hidden_size=10**5000), "x")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_link_out_of_the_checkpoint_is_not_followed(tmp_path, tiny_fields, name):
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(tiny_fields()))
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(secret)
    with pytest.raises(InputError, match="outside of the checkpoint"):
        read_config(directory)
