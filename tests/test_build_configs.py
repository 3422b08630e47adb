"""Every shipped build configuration is valid, resolvable, and named after its engine."""

from __future__ import annotations

import pytest

from kvc_trt import policies
from kvc_trt.config import BuildConfig
from kvc_trt.models.presets import build_configs_directory, list_presets, load_preset
from kvc_trt.validation import read_mapping, validated

FILES = sorted(build_configs_directory().glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_build_config_resolves(path):
    config = validated(BuildConfig, read_mapping(path), str(path))
    assert path.stem == f"{config.model}-{config.policy}"
    preset = load_preset(config.model)
    assert config.overrides() == {}  # the model's preset has them, once
    suitable = {name: preset.defaults[name] for name in ("pool_kernel", "skip_layers") if name in preset.defaults}
    parameters = policies.resolve(
        config.policy,
        model=preset.config,
        token_budget=config.token_budget,
        max_input_len=config.max_input_len,
        max_output_len=config.max_output_len,
        **policies.applicable(config.policy, suitable),
    )
    assert parameters.max_sequence_len == config.max_input_len + config.max_output_len
    assert parameters.skip_layers == preset.defaults.get("skip_layers", 2 if config.policy == "quest" else 0)


def test_every_model_has_the_method_and_its_dense_twin():
    names = {path.stem for path in FILES}
    for model in list_presets():
        assert {f"{model}-rocketkv", f"{model}-full"} <= names
