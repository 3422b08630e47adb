from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvc_trt.config import BuildConfig, configured, layered, parse_settings, read_configuration
from kvc_trt.errors import InputError


def test_later_layers_override_and_the_rest_is_kept():
    config = layered(
        [("a.yaml", {"model": "x", "token_budget": 64, "policy": "full"}), ("--set", {"token_budget": 128})]
    )
    assert (config.model, config.policy, config.token_budget) == ("x", "full", 128)


@pytest.mark.parametrize(("given", "recorded"), [(True, {"all_logits": True}), (False, {}), (None, {})])
def test_a_switch_that_is_off_is_not_recorded(given, recorded):
    stored = BuildConfig(model="x", all_logits=given).stored()
    assert {name: value for name, value in stored.items() if name == "all_logits"} == recorded


def test_an_unknown_key_names_the_file_the_key_and_the_nearest_one():
    with pytest.raises(InputError, match=r"a\.yaml: unknown key 'token_budgt'; did you mean 'token_budget'\?"):
        layered([("a.yaml", {"model": "x", "token_budgt": 64})])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("token_budget", "64"),
        ("token_budget", "x%"),
        ("token_budget", 64.5),
        ("token_budget", -1),
        ("token_budget", True),
        ("all_logits", "yes"),
        ("token_budget", 2**40),
        ("weights", "fp9"),
        ("split", "evenly"),
        ("split", 1.5),
        ("split", float("nan")),
        ("dense_until", "sometimes"),
        ("random_weights", -1),
        ("model", ""),
        ("model", 3),
    ],
)
def test_a_wrong_value_names_its_key_and_what_was_found(key, value):
    with pytest.raises(InputError, match=rf"(?s)a\.yaml: {key}.*found"):
        layered([("a.yaml", {"model": "x", key: value})])


def test_a_checkpoint_and_random_weights_exclude_each_other():
    with pytest.raises(InputError, match="command line: checkpoint and random_weights exclude each other"):
        layered([("command line", {"model": "x", "checkpoint": "d", "random_weights": 0})])


def test_a_build_needs_a_model():
    with pytest.raises(InputError, match="no model given"):
        layered([("command line", {"token_budget": 3})])


@pytest.mark.parametrize(
    ("text", "value"),
    [("page_size=8", 8), ("dense_until=auto", "auto"), ("split=0.25", 0.25), ("verify=false", False)],
)
def test_set_values_are_typed(text, value):
    assert parse_settings([text]) == {text.split("=")[0]: value}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["page_size"], "expected key=value"),
        (["=3"], "expected key=value"),
        (["page_sise=8"], "did you mean 'page_size'"),
        (["page_size=8", "page_size=9"], "set twice"),
        (["page_size=[1"], "the value is not valid YAML"),
    ],
)
def test_a_malformed_setting_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        parse_settings(settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: x\nmodel: y\n", "repeated"),
        ("- model\n", "one mapping"),
        ("model: [x\n", "not valid YAML"),
        ("1: x\n", "not text"),
        ("model: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
        ("", "one mapping"),
        ("\x00", "not valid YAML"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path, text, message):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_configuration(path)


def test_a_missing_or_oversized_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_configuration(tmp_path / "absent.yaml")
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (5 << 20))
    with pytest.raises(InputError, match=r"expected at most 4\.0 MiB"):
        read_configuration(large)


def test_an_engines_config_is_read_as_settings_and_recorded_numbers(tmp_path):
    stored = BuildConfig(model="x", token_budget=64).stored()
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"build_config": {"kvc_trt": stored}, "kv_compression": {"parameters": {"top_k": 5}, "state": []}})
    )
    assert read_configuration(path) == (stored, {"top_k": 5})


@pytest.mark.parametrize("content", [{"kv_compression": 3}, {"kv_compression": {"parameters": {}}, "build_config": []}])
def test_an_incomplete_engine_config_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"build_config\.kvc_trt"):
        read_configuration(path)


@pytest.mark.parametrize(
    ("settings", "unchanged"),
    [
        ({}, True),
        ({"verify": False}, True),
        ({"weights": "int4"}, True),
        ({"token_budget": 3}, False),
        ({"model": "x"}, False),
    ],
)
def test_a_change_of_policy_or_model_ends_a_replay(settings, unchanged, tmp_path):
    path = tmp_path / "config.json"
    compression = {"parameters": {"top_k": 5}}
    path.write_text(json.dumps({"build_config": {"kvc_trt": {"model": "m"}}, "kv_compression": compression}))
    config, recorded = configured(path, ("--set", {}), ("command line", settings))
    assert config.model == settings.get("model", "m")
    assert recorded == ({"top_k": 5} if unchanged else {})


def test_a_stored_configuration_builds_the_same_one():
    config = BuildConfig(model="x", token_budget=64, split=0.25, dense_until=100, page_size=4, random_weights=0)
    assert layered([("config.json", config.stored())]) == config
    assert "verify" not in config.stored()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(st.text(max_size=60), st.binary(max_size=60).map(lambda raw: raw.decode("latin-1"))))
def test_any_text_is_read_or_refused(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with contextlib.suppress(InputError):
        settings_, recorded = read_configuration(path)
        assert isinstance(settings_, dict)
        assert recorded == {}


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2)
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([*BuildConfig.model_fields, "modle", "budget"]), VALUES, max_size=6))
def test_any_mapping_is_accepted_or_refused(mapping):
    try:
        config = layered([("a.yaml", mapping)])
    except InputError:
        return
    assert set(mapping) <= set(BuildConfig.model_fields)
    assert layered([("again", config.stored())]).stored() == config.stored()


def test_a_later_source_of_weights_replaces_an_earlier_one():
    config = layered([("a", {"model": "x", "random_weights": 0}), ("b", {"checkpoint": "d"})])
    assert (config.random_weights, config.checkpoint) == (None, "d")
    config = layered([("a", {"model": "x", "revision": "main"}), ("b", {"random_weights": 1})])
    assert (config.random_weights, config.revision) == (1, None)
