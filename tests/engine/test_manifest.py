"""Tampering with an engine, and being found out before anything is loaded."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvc_trt.backends.opening import open_engine
from kvc_trt.engine.files import check_name
from kvc_trt.engine.manifest import DEEPEST, SELF_DIGEST, canonical, sealed
from kvc_trt.errors import InputError
from kvc_trt.methods.base.constants import ADDED_LATER

FILES = ("config.json", "manifest.json", "prefill.onnx", "decode.onnx", "extend.onnx", "weights.safetensors")


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def fields_of(engine):
    """Return the fields of the manifest, without its own digest."""
    fields = json.loads((engine / "manifest.json").read_bytes())
    del fields[SELF_DIGEST]
    return fields


def reseal(engine, **changes):
    """Write a manifest whose own digest is right, as a careful attacker would."""
    (engine / "manifest.json").write_bytes(sealed({**fields_of(engine), **changes}))


def rewrite(engine, config):
    """Replace config.json, with the right digests."""
    content = canonical(config)
    (engine / "config.json").write_bytes(content)
    record = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    reseal(engine, files={**fields_of(engine)["files"], "config.json": record})


def test_a_fresh_engine_opens_whole(tiny_engine):
    engine = open_engine(tiny_engine)
    assert set(engine.files) == set(FILES) - {"manifest.json"}
    assert engine.parameters.token_budget == 32
    assert engine.model.num_hidden_layers == 2
    assert engine.build.random_weights == 0
    assert engine.tokenizer_file is None
    assert [tensor.name for tensor in engine.state][:3] == ["k_cache.0", "v_cache.0", "bounds.0"]
    assert "model.norm.weight" in engine.weights().names()


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("name", FILES)
def test_one_changed_byte_is_found(tiny_engine, name, place):
    path = tiny_engine / name
    size = path.stat().st_size
    flip(path, {"first": 0, "middle": size // 2, "last": size - 1}[place])
    with pytest.raises(InputError) as caught:
        open_engine(tiny_engine)
    assert name in caught.value.message or "kvc-trt" in caught.value.message


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_byte_of_the_descriptions_is_found(tiny_engine, data):
    path = tiny_engine / data.draw(st.sampled_from(["config.json", "manifest.json"]))
    original = path.read_bytes()
    position = data.draw(st.integers(0, len(original) - 1))
    changed = bytearray(original)
    changed[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(changed)
    try:
        with pytest.raises(InputError):
            open_engine(tiny_engine)
    finally:
        path.write_bytes(original)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("cut", [0, 1, 100])
def test_a_truncated_file_is_found(tiny_engine, name, cut):
    path = tiny_engine / name
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(InputError):
        open_engine(tiny_engine)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found(tiny_engine, name):
    (tiny_engine / name).unlink()
    with pytest.raises(InputError, match=name):
        open_engine(tiny_engine)


@pytest.mark.parametrize("name", ["libevil.so", "tokenizer/extra.json", "weights.safetensors.bak"])
def test_a_further_file_is_found(tiny_engine, name):
    (tiny_engine / name).parent.mkdir(exist_ok=True)
    (tiny_engine / name).write_text("x")
    with pytest.raises(InputError, match="not in the manifest"):
        open_engine(tiny_engine)


def test_a_symbolic_link_is_refused_even_to_the_same_content(tiny_engine, tmp_path):
    shutil.copy(tiny_engine / "decode.onnx", tmp_path / "elsewhere.onnx")
    (tiny_engine / "decode.onnx").unlink()
    (tiny_engine / "decode.onnx").symlink_to(tmp_path / "elsewhere.onnx")
    with pytest.raises(InputError, match="symbolic link"):
        open_engine(tiny_engine)


def test_a_linked_manifest_directory_or_pipe_is_refused(tiny_engine, tmp_path):
    shutil.copy(tiny_engine / "manifest.json", tmp_path / "manifest.json")
    (tiny_engine / "manifest.json").unlink()
    (tiny_engine / "manifest.json").symlink_to(tmp_path / "manifest.json")
    with pytest.raises(InputError):
        open_engine(tiny_engine)
    (tiny_engine / "manifest.json").unlink()
    shutil.copy(tmp_path / "manifest.json", tiny_engine)
    (tiny_engine / "tokenizer").symlink_to(tmp_path)
    with pytest.raises(InputError, match="symbolic link"):
        open_engine(tiny_engine)
    (tiny_engine / "tokenizer").unlink()
    os.mkfifo(tiny_engine / "pipe")
    with pytest.raises(InputError, match="neither a file nor a directory"):
        open_engine(tiny_engine)


@pytest.mark.parametrize(
    "name",
    ["../outside", "/etc/passwd", "a/../../b", "./config.json", "a//b", "", "..", ".hidden", "a\\b", "a\0b", "a\n"],
)
def test_a_name_that_leads_out_is_refused(tiny_engine, name):
    manifest = fields_of(tiny_engine)
    reseal(tiny_engine, files={**manifest["files"], name: {"sha256": "0" * 64, "size": 1}})
    with pytest.raises(InputError, match="not a path inside the engine directory"):
        open_engine(tiny_engine)


@given(st.text(max_size=30))
def test_accepted_names_stay_inside(name):
    from pathlib import Path

    root = Path("/engine")
    try:
        check_name(name, root)
    except InputError:
        return
    assert Path(os.path.normpath(root / name)).is_relative_to(root)
    assert os.path.normpath(root / name) == f"/engine/{name}"


@pytest.mark.parametrize(
    "entry",
    [None, 3, {}, {"sha256": "0" * 64, "size": -1}, {"sha256": "zz", "size": 1}, {"sha256": "0" * 64, "size": True}],
)
def test_a_malformed_entry_is_refused(tiny_engine, entry):
    manifest = fields_of(tiny_engine)
    reseal(tiny_engine, files={**manifest["files"], "decode.onnx": entry})
    with pytest.raises(InputError, match=r"manifest\.json: files\.decode\.onnx"):
        open_engine(tiny_engine)


@pytest.mark.parametrize("files", [None, [], {}])
def test_a_manifest_without_files_is_refused(tiny_engine, files):
    reseal(tiny_engine, files=files)
    with pytest.raises(InputError):
        open_engine(tiny_engine)


def test_another_version_is_refused_with_the_command_that_rebuilds(tiny_engine):
    reseal(tiny_engine, version="0.0.1")
    with pytest.raises(InputError, match=r"built by kvc-trt '0\.0\.1', expected") as caught:
        open_engine(tiny_engine)
    assert caught.value.hint == (
        f"rebuild it: kvc-trt build --config {tiny_engine}/config.json -o {tiny_engine} --force"
    )


def test_a_config_of_another_version_is_refused(tiny_engine):
    rewrite(tiny_engine, {**json.loads((tiny_engine / "config.json").read_bytes()), "version": "9"})
    with pytest.raises(InputError, match="version '9', expected"):
        open_engine(tiny_engine)


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"{", b"\xff\xfe", b"[" * 100_000, b'{"version": NaN}'])
def test_a_malformed_manifest_is_refused(tiny_engine, content):
    (tiny_engine / "manifest.json").write_bytes(content)
    with pytest.raises(InputError):
        open_engine(tiny_engine)


def test_a_manifest_in_another_layout_is_refused(tiny_engine):
    path = tiny_engine / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_bytes())))
    with pytest.raises(InputError, match="changed"):
        open_engine(tiny_engine)


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999", b"9" * 5000])
@pytest.mark.parametrize("digest", [hashlib.sha256(b"").hexdigest(), "0" * 64])
def test_a_number_that_no_json_has_is_refused(tiny_engine, number, digest):
    """The digest of nothing is what a reader computes that gives up at such a number."""
    fields = {**fields_of(tiny_engine), "build_config": 0, SELF_DIGEST: digest}
    content = canonical(fields).replace(b'"build_config": 0', b'"build_config": ' + number)
    (tiny_engine / "manifest.json").write_bytes(content)
    with pytest.raises(InputError, match="is not valid JSON"):
        open_engine(tiny_engine)


@pytest.mark.parametrize("depth", [DEEPEST, 300])
@pytest.mark.parametrize("name", ["manifest.json", "config.json"])
def test_a_description_nested_too_deep_is_refused_before_it_is_made_canonical(tiny_engine, name, depth):
    content = b'{"version": "0.1.0", "target": ' + b"[" * depth + b"]" * depth + b"}"
    path = tiny_engine / name
    path.write_bytes(content)
    if name == "config.json":
        record = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        reseal(tiny_engine, files={**fields_of(tiny_engine)["files"], name: record})
    with pytest.raises(InputError, match=rf"{name}: nested more than {DEEPEST} deep"):
        open_engine(tiny_engine)


@pytest.mark.parametrize("kind", ["a directory", "a pipe", "a device", "17.0 MiB"])
@pytest.mark.parametrize("name", ["manifest.json", "config.json"])
def test_files_that_are_no_description_are_refused_at_once(tiny_engine, tmp_path, name, kind):
    path = tiny_engine / name
    path.unlink()
    if kind == "a directory":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(17 << 20)
    expected = {"a device": "config.json is a symbolic link|cannot read .*manifest.json"}.get(kind, kind)
    found = expected if name == "manifest.json" else "missing|neither a file|wrong size|symbolic link"
    with pytest.raises(InputError, match=found) as caught:
        open_engine(tiny_engine)
    assert "\n" not in caught.value.message


def test_a_length_that_no_engine_has_is_refused_wherever_it_is_recorded_alike(tiny_engine):
    config = json.loads((tiny_engine / "config.json").read_bytes())
    for section in (config["build_config"], config["kv_compression"]["parameters"]):
        section["max_input_len"] = 10**18
    del config["build_config"]["kvc_trt"]["max_input_len"]
    rewrite(tiny_engine, config)
    with pytest.raises(InputError, match=r"parameters\.max_input_len: .* less than or equal to 2147483647"):
        open_engine(tiny_engine)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"weights": "fp16"}, "dtype is float32, fp16 weights compute in float16"),
        ({"weights": "auto"}, "weights"),
        ({"policy": "quest"}, "policy is 'rocketkv', kvc_trt has 'quest'"),
        ({"max_input_len": 255}, "max_input_len is 256, kvc_trt has 255"),
        ({"tensor_parallel": 2}, "tensor_parallel"),
    ],
)
def test_settings_that_are_not_those_of_the_engine_are_refused(tiny_engine, changes, found):
    config = json.loads((tiny_engine / "config.json").read_bytes())
    config["build_config"]["kvc_trt"] |= changes
    rewrite(tiny_engine, config)
    reseal(tiny_engine, build_config=config["build_config"]["kvc_trt"])
    with pytest.raises(InputError, match=found):
        open_engine(tiny_engine)


def test_the_state_of_turns_is_refused_without_their_graph(tiny_engine):
    (tiny_engine / "extend.onnx").unlink()
    files = fields_of(tiny_engine)["files"]
    del files["extend.onnx"]
    reseal(tiny_engine, files=files)
    with pytest.raises(InputError, match="the state has the tensors of turns"):
        open_engine(tiny_engine)


@pytest.mark.parametrize("kind", ["absent", "file", "empty directory"])
def test_directories_that_are_not_engines_are_refused(tmp_path, kind):
    path = tmp_path / "engine"
    if kind == "file":
        path.write_text("x")
    elif kind == "empty directory":
        path.mkdir()
    with pytest.raises(InputError, match="engine directory"):
        open_engine(path)


@pytest.mark.parametrize("target", [{}, {"backend": "tensorrt", "architecture": "sm_90"}])
def test_an_engine_for_another_target_is_refused(tiny_engine, target):
    reseal(tiny_engine, target=target)
    with pytest.raises(InputError, match=r"was built for .*: expected {'backend': 'onnxruntime'"):
        open_engine(tiny_engine)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("kv_compression", "parameters", "top_k"), None),
        (("kv_compression", "parameters", "unheard_of"), 3),
        (("kv_compression", "parameters", "prompt_eviction"), "sinks"),
        (("kv_compression", "parameters", "decode_selection"), "all"),
        (("build_config", "kvc_trt", "polcy"), "full"),
        (("build_config", "kvc_trt"), None),
        (("pretrained_config", "num_hidden_layers"), -2),
        (("pretrained_config",), None),
        (("kv_compression",), None),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_even_with_right_digests(tiny_engine, path, value):
    config = json.loads((tiny_engine / "config.json").read_bytes())
    *parents, last = path
    section = config
    for parent in parents:
        section = section[parent]
    if value is None:
        del section[last]
    else:
        section[last] = value
    rewrite(tiny_engine, config)
    with pytest.raises(InputError, match=r"config\.json"):
        open_engine(tiny_engine)


@pytest.mark.parametrize("pages", [19, 24])
def test_an_engine_with_unrounded_pages_is_refused_with_the_command_that_rebuilds(tiny_engine, pages):
    config = json.loads((tiny_engine / "config.json").read_bytes())
    (bounds,) = (entry for entry in config["kv_compression"]["state"] if entry["name"] == "bounds.1")
    expected = bounds["shape"][-1]
    bounds["shape"][-1] = pages
    rewrite(tiny_engine, config)
    with pytest.raises(InputError, match=rf"state\.6\.shape\.2 is {pages}, expected {expected}") as caught:
        open_engine(tiny_engine)
    assert caught.value.hint.startswith("rebuild it: kvc-trt build --config ")


@pytest.mark.parametrize("entry", [
    {}, 3, "bounds", {"name": "bounds.0"}, {"name": "bounds.0", "dtype": "float16", "shape": []},
    {"name": "bounds.0", "dtype": "int9", "shape": [8]}, {"name": "bounds.0", "dtype": "float16", "shape": ["8"]},
])  # fmt: skip
def test_a_state_that_makes_no_sense_is_refused(tiny_engine, entry):
    config = json.loads((tiny_engine / "config.json").read_bytes())
    config["kv_compression"]["state"].append(entry)
    rewrite(tiny_engine, config)
    with pytest.raises(InputError, match=r"config\.json: kv_compression\.state"):
        open_engine(tiny_engine)


def test_an_engine_from_before_a_number_existed_has_its_default(tiny_engine):
    whole = open_engine(tiny_engine).config
    older = dataclasses.replace(whole.parameters, by_length=False)  # the others have their defaults in this engine
    config = json.loads((tiny_engine / "config.json").read_bytes())
    for name in ADDED_LATER:
        del config["kv_compression"]["parameters"][name]
    for entry in (entry for entry in config["kv_compression"]["state"] if entry["in_step"]):
        del entry["in_step"]
    rewrite(tiny_engine, config)
    assert open_engine(tiny_engine).config == dataclasses.replace(whole, parameters=older)


@pytest.mark.parametrize("damage", ["missing", "wrong size", "changed"])
def test_a_damaged_configuration_is_not_named_as_what_to_rebuild_from(tiny_engine, damage):
    config = tiny_engine / "config.json"
    content = config.read_bytes()
    config.unlink() if damage == "missing" else config.write_bytes(
        content[:-1] if damage == "wrong size" else content.replace(b"rocketkv", b"rocketkw", 1)
    )
    with pytest.raises(InputError, match=rf"config\.json .*{damage}") as caught:
        open_engine(tiny_engine)
    assert "--config" not in caught.value.hint
    assert f"-o {tiny_engine} --force" in caught.value.hint
