from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import PydanticUndefined

from kvc_trt.errors import InputError
from kvc_trt.models.config import ModelConfig, ModelDescription, RopeScaling, check_length
from kvc_trt.models.family import HARMLESS, UNDECLARED, families, family, family_of_own_file
from kvc_trt.models.family_weights import FamilyWeights, Rows, channel_order, in_our_order
from kvc_trt.models.formats import open_checkpoint, weights_of
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.models.sources.hugging_face import parse_config
from kvc_trt.models.sources.text_part import text_fields
from kvc_trt.models.weights import WeightSource
from tests.oracles.family_models import config_class, our_config, their_config, written
from tests.small_model import SMALL

QKV = "model.layers.0.self_attn.qkv_proj.weight"


def test_a_class_is_found_in_the_file_of_its_name_or_among_all():
    for architecture, one in families().items():
        assert family(architecture) is one
        assert family_of_own_file(architecture) in (one, None)
    assert family_of_own_file("GlmForCausalLM") is None, "glm4.py has it"
    with pytest.raises(KeyError):
        family("GPT2LMHeadModel")


def test_a_class_in_a_file_of_its_name_imports_no_other_family():
    script = (
        "import sys; from kvc_trt.models.presets import load_preset; load_preset('llama3.1-8b'); "
        "print(*(name for name in sys.modules if name.startswith('kvc_trt.models.families.')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["kvc_trt.models.families.llama"]


@pytest.mark.parametrize("architecture", families())
def test_every_field_of_transformers_is_read_or_harmless(architecture: str) -> None:
    """A field that neither a family reads nor somebody has looked at could change what the model computes."""
    transformers = pytest.importorskip("transformers")
    family = families()[architecture]
    theirs = getattr(transformers, config_class(architecture.removesuffix("ForCausalLM")))().to_dict()
    read = {family.spelling.get(name, name) for name in family.fields.model_fields}
    assert set(theirs) - read - family.harmless - HARMLESS == set()


READ_FROM_ANY = re.compile(r"""(?:getattr|hasattr)\(\s*(?:self\.)?\w*config\w*(?:\.\w+\(.*?\))?,\s*"(\w+)\"""")
"""A field that transformers asks a configuration for, whether its class declares it or not."""
OF_OTHERS = {
    "_is_quantized", "classifier_dropout", "number_of_conv_states", "original_max_position_embeddings",
    "use_bidirectional_attention", "hidden_dropout",
}  # fmt: skip
"""Such fields that other checks cover, or that no decoder of ours has."""


@pytest.mark.parametrize("architecture", families())
def test_a_field_that_transformers_reads_undeclared_is_read_or_checked(architecture: str) -> None:
    """A class need not declare what masks and caches ask every configuration for, such as `is_causal`."""
    transformers = pytest.importorskip("transformers")
    family = families()[architecture]
    root = Path(transformers.__file__).parent
    model = root / Path(inspect.getfile(getattr(transformers, architecture))).relative_to(root)
    text = "".join(path.read_text() for path in (model, root / "masking_utils.py", root / "cache_utils.py"))
    asked = set(READ_FROM_ANY.findall(text))
    assert {"is_causal", "layer_types", "sliding_window"} <= asked
    read = {family.spelling.get(name, name) for name in family.fields.model_fields}
    assert asked - read - family.harmless - HARMLESS - UNDECLARED.keys() - OF_OTHERS == set()


@pytest.mark.parametrize("architecture", families())
def test_absent_fields_have_transformers_defaults(architecture: str) -> None:
    transformers = pytest.importorskip("transformers")
    family = families()[architecture]
    theirs = getattr(transformers, config_class(architecture.removesuffix("ForCausalLM")))
    theta = theirs.default_theta
    if isinstance(theta, dict):  # by kind of layer
        theta = {"rope_theta": theta["global"], "rope_local_base_freq": theta["local"]}
    else:
        theta = {family.spelling.get("rope_theta", "rope_theta"): theta}
    defaults = {**theirs().to_dict(), **theta}
    ours = {family.spelling.get(name, name): field.default for name, field in family.fields.model_fields.items()}
    compared = {name for name, value in ours.items() if name in defaults and value not in (None, PydanticUndefined)}
    assert compared >= {"hidden_act", "tie_word_embeddings"} & set(defaults)
    assert {name: ours[name] for name in compared} == {name: defaults[name] for name in compared}


def cohere2(**changes: object) -> ModelConfig:
    """Return the configuration of a small Command R7B."""
    fields = {"architectures": ["Cohere2ForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96}
    fields |= {"num_hidden_layers": 5, "num_attention_heads": 4, "max_position_embeddings": 8192}
    return parse_config({**fields, **changes}, "config.json")


def test_the_layers_of_full_attention_of_command_r7b_do_not_rotate() -> None:
    model = cohere2()
    assert [model.attention(layer).rotary for layer in range(5)] == [True, True, True, False, True]
    assert [model.attention(layer).window for layer in range(5)] == [4096, 4096, 4096, None, 4096]
    assert model.windows(4096) is None
    assert model.windows(4097) == (4096, 4096, 4096, 0, 4096)
    assert [one.rotary for one in cohere2(sliding_window_pattern=2).description.attention] == [True, False] * 2 + [True]
    full = cohere2(layer_types=["full_attention"] * 5)
    assert full.windows(8192) is None
    assert not any(one.rotary for one in full.description.attention)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 32}, "head_dim is 32, expected 16"),
        ({"sliding_window": None}, "sliding_window is null, expected a number of tokens"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types has 4 names, expected one for each of 5 layers"),
        ({"layer_types": ["chunked_attention"] * 5}, "layer_types"),
    ],
)
def test_impossible_settings_of_command_r7b_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        cohere2(**changes)


def gemma3(**changes: object) -> ModelConfig:
    """Return the configuration of a small Gemma 3, as files from before transformers 5 spell it."""
    fields = {"architectures": ["Gemma3ForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96}
    fields |= {"num_hidden_layers": 7, "num_attention_heads": 4, "max_position_embeddings": 8192}
    return parse_config({**fields, **changes}, "config.json")


def test_both_spellings_of_the_rotary_settings_of_gemma_3_mean_the_same() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    older = gemma3(rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling=linear)
    by_kind = {"full_attention": {**linear, "rope_theta": 5e5}, "sliding_attention": {"rope_theta": 2e4}}
    assert older == gemma3(rope_parameters=by_kind)
    assert (older.rotary_base, older.rotary_scaling) == (5e5, RopeScaling("linear", 8.0))
    assert [older.attention(layer).rotary_base for layer in range(7)] == [2e4] * 5 + [None, 2e4]
    assert older.rotary_bases == (2e4,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is true, expected false"),
        ({"sliding_window": None}, "sliding_window is null, expected a number of tokens"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "sliding_attention"),
        ({"rope_parameters": {"full_attention": 3}}, "rope_parameters"),
    ],
)
def test_impossible_settings_of_gemma_3_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        gemma3(**changes)


def olmo3(**changes: object) -> ModelConfig:
    fields = {"architectures": ["Olmo3ForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96}
    fields |= {"num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 8192}
    return parse_config({**fields, **changes}, "config.json")


def test_sliding_layers_of_olmo_3_have_the_base_of_its_published_files() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    published = olmo3(rope_theta=5e5, rope_scaling=yarn)
    by_kind = {"full_attention": {**yarn, "rope_theta": 5e5}, "sliding_attention": {"rope_theta": 5e5}}
    assert published == olmo3(rope_parameters=by_kind)
    assert (published.rotary_base, published.rotary_bases) == (5e5, (5e5,))


@pytest.mark.parametrize("changes", [{"rope_theta": 1e4}, {"rope_parameters": {"rope_theta": 1e4}}])
def test_an_ambiguous_rotary_base_of_olmo_3_is_refused(
    changes: dict[str, object],
) -> None:
    """Release 4 gives it to sliding layers too, and release 5 gives them 500,000."""
    with pytest.raises(InputError, match="rope_theta is 10000, expected 500000, or rope_parameters with"):
        olmo3(**changes)
    by_kind = {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}
    assert olmo3(rope_parameters=by_kind).rotary_bases == (1e4,)


def test_the_norms_of_gemma_3_multiply_by_one_more_than_their_weight() -> None:
    norm = "model.layers.0.input_layernorm.weight"

    class Halves(RandomWeights):
        def dtype(self, name: str) -> str:
            return "bfloat16"

        def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
            return np.full((stop - start,), 0.0078125, ml_dtypes.bfloat16)

    source = FamilyWeights(Halves(SMALL, 0), {norm: Rows(norm, plus=1.0)})
    assert source.dtype(norm) == "float32"
    assert (source.read(norm) == np.float32(1.0078125)).all()  # bfloat16 holds it too, but no smaller step


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "num_experts is missing"),
        ({"num_experts": 4, "num_local_experts": 8}, "num_experts is 4 and num_local_experts 8, expected one number"),
        ({"num_local_experts": 0}, "num_local_experts: input should be greater than or equal to 1, found 0"),
        ({"num_local_experts": 10**9}, "num_local_experts: input should be less than or equal to 1024"),
        ({"num_local_experts": 2}, "num_experts_per_tok is 3, expected at most the 2 experts"),
        ({"num_local_experts": 8, "num_experts_per_tok": 0}, "num_experts_per_tok: input should be greater"),
    ],
)
def test_numbers_of_experts_that_do_not_fit_are_refused(changes: dict[str, int], words: str) -> None:
    fields = {"architectures": ["MixtralForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96}
    fields |= {"num_hidden_layers": 2, "num_attention_heads": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    with pytest.raises(InputError, match=words):
        parse_config({**fields, "num_experts_per_tok": 3, **changes}, "config.json")


def test_the_channels_of_a_head_are_in_order_unless_pairs_are_neighbours() -> None:
    assert channel_order(SMALL, interleaved=False) is None
    order = channel_order(SMALL, interleaved=True)
    assert order is not None
    half = SMALL.head_size // 2
    assert np.array_equal(order[half:], order[:half] + 1)  # pair i is 2i and 2i + 1


def test_the_channels_that_do_not_rotate_are_the_last_of_each_half() -> None:
    config = replace(SMALL, head_size=12, description=ModelDescription(rotary_channels=4))
    halves, neighbours = (channel_order(config, interleaved=interleaved) for interleaved in (False, True))
    assert halves is not None
    assert neighbours is not None
    assert halves.tolist() == [0, 1, 4, 5, 6, 7, 2, 3, 8, 9, 10, 11]
    assert neighbours.tolist() == [0, 2, 4, 5, 6, 7, 1, 3, 8, 9, 10, 11]


class Joined(RandomWeights):
    """A checkpoint that stores, for each KV head, its query heads, its key and its value in one matrix."""

    def names(self) -> list[str]:
        return [QKV, "other.weight"]

    def shape(self, name: str) -> tuple[int, ...]:
        return {QKV: ((SMALL.num_attention_heads + 2 * SMALL.num_key_value_heads) * SMALL.head_size, 3)}.get(
            name, (5, 2)
        )

    def dtype(self, name: str) -> str:
        return "float32"

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        rows, columns = self.shape(name)
        return np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)[start:stop]


def joined() -> WeightSource:
    group, size = SMALL.group_size, SMALL.head_size
    step, blocks = (group + 2) * size, SMALL.num_key_value_heads
    parts = (("q", 0, group * size), ("k", group * size, size), ("v", (group + 1) * size, size))
    places = {
        f"model.layers.0.self_attn.{part}_proj.weight": Rows(QKV, start, rows, blocks, step)
        for part, start, rows in parts
    }
    return in_our_order(Joined(SMALL, 0), SMALL, places, interleaved=True)


def test_one_matrix_of_a_checkpoint_is_three_of_ours() -> None:
    source, size = joined(), SMALL.head_size
    whole = Joined(SMALL, 0).read_rows(QKV, 0, 1 << 20)
    by_group = whole.reshape(SMALL.num_key_value_heads, SMALL.group_size + 2, size, 3)
    pairs = np.r_[0:size:2, 1:size:2]
    expected = {"q": by_group[:, :-2, pairs], "k": by_group[:, -2:-1, pairs], "v": by_group[:, -1:]}
    assert source.names() == [*(f"model.layers.0.self_attn.{part}_proj.weight" for part in expected), "other.weight"]
    for part, rows in expected.items():
        name = f"model.layers.0.self_attn.{part}_proj.weight"
        assert np.array_equal(source.read(name), rows.reshape(-1, 3))
        assert source.shape(name) == source.read(name).shape
        assert source.dtype(name) == "float32"
    assert np.array_equal(source.read("other.weight"), np.arange(10).reshape(5, 2))


@settings(deadline=None, max_examples=50)
@given(st.sampled_from("qkv"), st.data())
def test_reading_some_rows_equals_slicing_the_whole_tensor(part: str, data: st.DataObject) -> None:
    source, name = joined(), f"model.layers.0.self_attn.{part}_proj.weight"
    rows = source.shape(name)[0]
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    assert np.array_equal(source.read_rows(name, start, stop), source.read(name)[start:stop])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "phi3",
            {"num_key_value_heads": 1},
            r"0.self_attn.qkv_proj.weight has shape \[128, 64\], expected \[96",
        ),
        ("phi3", {"num_key_value_heads": 4}, r"qkv_proj.weight has shape \[128, 64\], expected \[192, 64\]"),
        ("falcon-7b", {"multi_query": False}, r"query_key_value.weight has shape \[96, 64\], expected \[192, 64\]"),
        ("falcon-40b", {"num_kv_heads": 1}, r"query_key_value.(weight|bias) has shape \[128(, 64)?\], expected \[96"),
    ],
)
def test_a_joined_tensor_with_other_rows_than_its_parts_is_refused(
    name: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    written(name, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(InputError, match=message):
        weights_of(open_checkpoint(tmp_path))


def test_a_checkpoint_in_our_order_is_read_unchanged() -> None:
    source = RandomWeights(SMALL, 0)
    assert in_our_order(source, SMALL, None, interleaved=False) is source
    assert isinstance(in_our_order(source, SMALL, None, interleaved=True), FamilyWeights)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("falcon-7b", {"alibi": True}, "alibi is true, expected false"),
        ("falcon-7b", {"parallel_attn": False}, "parallel_attn is false beside multi_query"),
        ("olmo", {"clip_qkv": 8.0}, "clip_qkv is 8, expected null"),
        (
            "smollm3",
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
            "layer_types has sliding layers, expected use_sliding_window true",
        ),
        ("llama", {"is_causal": False}, "is_causal is false, expected true for LlamaForCausalLM"),
        ("qwen2", {"is_causal": None}, "is_causal is null, expected true"),
        ("gemma3", {"is_causal": False}, "is_causal is false, expected true"),
        ("llama", {"sliding_window": 64}, "sliding_window is 64, expected null"),
        (
            "llama",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types is 'sliding_attention', expected null for LlamaForCausalLM: its layers are all of one kind",
        ),
        ("llama", {"layer_types": {"full_attention": 1}}, "layer_types is {'full_attention': 1}, expected null"),
        (
            "llama",
            {"attention_chunk_size": 8192},
            "attention_chunk_size is 8192, expected null for LlamaForCausalLM: no part attends within chunks",
        ),
        ("llama", {"kv_sharing_modes": ["reuse"]}, "kv_sharing_modes is .* expected null"),
        ("llama", {"per_layer_config": {"0": {"intermediate_size": 8}}}, "per_layer_config is .* expected null"),
        (
            "llama",
            {"architectures": ["Ministral3ForCausalLM"]},
            "another class: Ministral 3 multiplies queries by a fac",
        ),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before is false, expected true"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm is true, expected false"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim is 32, expected 64 as hidden_size"),
    ],
)
def test_a_field_that_no_part_computes_is_refused_by_name(name: str, change: dict[str, object], message: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(InputError, match=message):
        parse_config({**json.loads(their_config(name).to_json_string()), **change}, "config.json")


def test_a_decoder_of_ministral_3_is_refused_with_the_reason() -> None:
    given = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "ministral3"}}
    with pytest.raises(
        InputError, match=r"'ministral3', expected mistral for Mistral3.*: Ministral 3 multiplies queries"
    ):
        text_fields(given, "config.json")


def test_learned_positions_end_where_the_checkpoint_ends() -> None:
    """Rotary models may answer a little beyond their length; there is no vector that could."""
    pytest.importorskip("transformers")
    model = our_config("opt")
    check_length(model, model.max_position_embeddings, 32)
    with pytest.raises(InputError, match="1025 tokens together; OPTForCausalLM has learned the vectors of 1024"):
        check_length(model, model.max_position_embeddings + 1, 32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is 3, expected a multiple of linear_num_key_heads"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types has no full_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 names, expected one for each of 4 layers"),
    ],
)
def test_linear_layers_that_do_not_fit_are_refused(changes: dict[str, object], words: str) -> None:
    fields = json.loads(their_config("qwen3.5").to_json_string())
    with pytest.raises(InputError, match=words):
        parse_config({**fields, **changes}, "config.json")


def test_latent_attention_is_refused_with_its_reason() -> None:
    with pytest.raises(InputError, match=r"DeepseekV3ForCausalLM.* kv_lora_rank 512.*\(MLA\) caches one latent"):
        parse_config({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}, "config.json")
    beside_images = {"architectures": ["KimiForConditionalGeneration"], "text_config": {"kv_lora_rank": 512}}
    with pytest.raises(InputError, match=r"KimiForConditionalGeneration.* kv_lora_rank 512"):
        parse_config(beside_images, "config.json")


@pytest.mark.parametrize("name", ["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"])
def test_gemma_4_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(InputError, match="Gemma 4 differ in size and number, and some layers reuse keys and values"):
        parse_config({"architectures": [name]}, "config.json")
