from __future__ import annotations

import math
from dataclasses import replace

import pytest
import yaml

from kvc_trt.config import BuildConfig
from kvc_trt.engine.resolution.model_choice import choose_model, open_source
from kvc_trt.errors import InputError
from kvc_trt.models import check_length, presets
from kvc_trt.models.config import Yarn
from kvc_trt.models.presets import build_configs_directory, list_presets, load_preset
from kvc_trt.models.sources.checkpoint import Checkpoint
from kvc_trt.models.weights import check_weights, count_parameters


def test_the_models_of_the_paper_and_the_others_are_there():
    assert list_presets() == [
        "command-r-08-2024", "gemma-3-12b", "gpt-oss-20b", "llama3.1-70b", "llama3.1-8b", "longchat-7b-v1.5-32k",
        "mistral-7b-v0.1", "mistral-7b-v0.2", "mixtral-8x7b",
        "qwen2.5-7b", "qwen2.5-7b-128k", "qwen3-30b-a3b", "qwen3-8b", "qwen3-8b-128k", "qwen3.5-9b",
        "retrieval-text", "retrieval-tiny", "smollm2-135m-instruct",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "billions", "layers", "heads", "groups"),
    [
        ("llama3.1-8b", 8.03, 32, 32, 8),
        ("llama3.1-70b", 70.55, 80, 64, 8),
        ("longchat-7b-v1.5-32k", 6.74, 32, 32, 32),
        ("mistral-7b-v0.1", 7.24, 32, 32, 8),
        ("mistral-7b-v0.2", 7.24, 32, 32, 8),
        ("qwen2.5-7b", 7.62, 28, 28, 4),
        ("qwen3-8b", 8.19, 36, 32, 8),
    ],
)
def test_architectures_have_their_published_sizes(name, billions, layers, heads, groups):
    config = load_preset(name).config
    assert count_parameters(config) / 1e9 == pytest.approx(billions, abs=0.005)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (layers, heads, groups)
    assert config.head_size == 128


def test_gemma_3_12b_has_its_published_size_and_windows():
    config = load_preset("gemma-3-12b").config
    assert count_parameters(config) / 1e9 == pytest.approx(11.77, abs=0.005)
    windows = config.windows(32_768)
    assert windows == (*[1024] * 5, 0) * 8
    assert config.rotary_bases == (1e4,)


def test_qwen3_5_9b_has_its_published_size_and_linear_layers():
    config = load_preset("qwen3.5-9b").config
    assert count_parameters(config) / 1e9 == pytest.approx(8.95, abs=0.005)
    assert config.linear_layers == tuple(layer for layer in range(32) if layer % 4 != 3)
    assert config.description.rotary_channels == 64


def test_command_r_has_its_published_size():
    config = load_preset("command-r-08-2024").config
    assert count_parameters(config) / 1e9 == pytest.approx(32.30, abs=0.005)
    assert config.description.logit_scale == 0.0625


def test_gpt_oss_20b_has_its_published_size_windows_and_rotation():
    config = load_preset("gpt-oss-20b").config
    assert count_parameters(config) / 1e9 == pytest.approx(20.91, abs=0.005)
    assert config.windows(32_768) == (128, 0) * 12
    scaling = config.rotary_scaling
    assert isinstance(scaling, Yarn)
    assert (scaling.factor, scaling.original_max_position_embeddings, scaling.truncate) == (32.0, 4096, False)


@pytest.mark.parametrize("name", list_presets())
def test_every_preset_is_usable_as_it_stands(name):
    preset = load_preset(name)
    longest = preset.defaults["max_input_len"] + preset.defaults["max_output_len"]
    check_length(preset.config, longest, preset.defaults["max_output_len"])
    assert preset.revision is None  # no commit was verified, so none is invented
    assert sum(source is not None for source in (preset.hugging_face_id, preset.checkpoint, preset.file)) == 1
    assert preset.description
    assert preset.config.eos_token_ids


def test_presets_have_the_settings_of_their_model():
    assert load_preset("longchat-7b-v1.5-32k").defaults["skip_layers"] == 2
    assert load_preset("mistral-7b-v0.1").config.sliding_window == 4096
    assert load_preset("mistral-7b-v0.2").config.sliding_window is None
    assert load_preset("qwen2.5-7b").config.qkv_bias
    assert load_preset("qwen3-8b").config.qk_norm
    tiny = load_preset("retrieval-tiny").defaults
    assert (tiny["pool_kernel"], tiny["token_budget"], tiny["max_output_len"]) == (7, 64, 64)


@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen3-8b"])
def test_the_presets_of_128k_are_their_models_stretched_by_yarn(name):
    """As the model cards say: factor 4 over 32,768 positions."""
    plain, long = load_preset(name), load_preset(f"{name}-128k")
    yarn = Yarn(4.0, 32768, 0.1 * math.log(4.0) + 1)
    assert long.config == replace(plain.config, rotary_scaling=yarn, max_position_embeddings=131072)
    assert long.hugging_face_id == plain.hugging_face_id
    assert long.defaults["max_input_len"] + long.defaults["max_output_len"] == 131072


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(InputError, match=r"did you mean 'llama3.1-8b'") as caught:
        load_preset("Llama3.1-8B")
    assert "kvc-trt models" in (caught.value.hint or "")
    with pytest.raises(InputError, match=r"unknown model '\.\./x'"):
        load_preset("../x")


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """load_preset on a copy of retrieval-tiny's file with a change."""

    def load(change):
        content = yaml.safe_load((build_configs_directory() / "models" / "retrieval-tiny.yaml").read_text())
        change(content)
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / "edited.yaml").write_text(yaml.safe_dump(content))
        monkeypatch.setattr(presets, "build_configs_directory", lambda: tmp_path)
        return load_preset("edited")

    return load


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(huging_face_id="x"), "did you mean 'hugging_face_id'"),
        (lambda c: c["defaults"].update(pool_kernal=7), "did you mean 'pool_kernel'"),
        (lambda c: c["defaults"].update(token_budget=-1), "token_budget"),
        (lambda c: c["architecture"].update(hidden_size=-1), "hidden_size"),
        (lambda c: c.pop("architecture"), "architecture"),
        (lambda c: c.update(checkpoint="../elsewhere"), "checkpoint"),
        (lambda c: c.update(revision="main"), "40 hexadecimal"),
    ],
)
def test_an_invalid_preset_file_is_refused(edited, change, words):
    with pytest.raises(InputError, match=words):
        edited(change)


def test_the_packaged_copy_wins_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(presets, "_PACKAGE", tmp_path / "kvc_trt")
    assert build_configs_directory() == tmp_path / "build_configs"
    (tmp_path / "kvc_trt" / "build_configs").mkdir(parents=True)
    assert build_configs_directory() == tmp_path / "kvc_trt" / "build_configs"


@pytest.mark.parametrize(("name", "most_bytes"), [("retrieval-tiny", 3_000_000), ("retrieval-text", 4_000_000)])
def test_a_shipped_checkpoint_is_the_presets_model(name, most_bytes):
    preset = load_preset(name)
    assert preset.checkpoint is not None
    checkpoint = Checkpoint(preset.checkpoint)
    assert checkpoint.config == preset.config
    check_weights(checkpoint.config, checkpoint)
    assert checkpoint.tokenizer_path is not None
    assert (preset.checkpoint / "model.safetensors").stat().st_size <= most_bytes


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


def test_a_preset_stretches_a_checkpoint_that_has_no_scaling(edited):
    preset = edited(lambda content: content["architecture"].update(rope_scaling=YARN))
    assert Checkpoint(preset.checkpoint).config.rotary_scaling is None
    for checkpoint in (None, str(preset.checkpoint)):
        build = BuildConfig(model="edited", policy="full", checkpoint=checkpoint)
        opened, _ = open_source(choose_model("edited", checkpoint), build)
        assert opened.config.rotary_scaling == preset.config.rotary_scaling == Yarn(4.0, 4096, 0.1 * math.log(4.0) + 1)
        assert opened.config.max_position_embeddings == 4 * 4096


def test_a_checkpoint_of_another_scaling_is_refused(edited):
    preset = edited(lambda content: content["architecture"].update(rope_scaling={"type": "linear", "factor": 2.0}))
    with pytest.raises(InputError, match="is not edited: rotary_scaling is None, expected RopeScaling"):
        choose_model("edited", str(preset.checkpoint))
