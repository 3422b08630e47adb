"""Tampering with an engine, and being found out before anything is loaded."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvc_trt.backends.registry import open_engine
from kvc_trt.engine.directory import parameters_from
from kvc_trt.engine.files import check_name
from kvc_trt.engine.manifest import canonical, read_manifest, sealed
from kvc_trt.errors import InputError
from kvc_trt.methods.base.constants import ADDED_LATER
from tests.graph import small_models

FILES = ("config.json", "manifest.json", "prefill.onnx", "decode.onnx", "extend.onnx", "weights.safetensors")


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def reseal(engine, **changes):
    """Write a manifest whose own digest is right, as a careful attacker would."""
    manifest = {**read_manifest(engine), **changes}
    (engine / "manifest.json").write_bytes(sealed(manifest))


def rewrite(engine, config):
    """Replace config.json, with the right digests."""
    content = canonical(config)
    (engine / "config.json").write_bytes(content)
    record = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    reseal(engine, files={**read_manifest(engine)["files"], "config.json": record})


def test_a_fresh_engine_opens_whole(tiny_engine):
    engine = open_engine(tiny_engine)
    assert set(engine.files) == set(FILES) - {"manifest.json"}
    assert engine.parameters.token_budget == 32
    assert engine.model.num_hidden_layers == 2
    assert engine.build.random_weights == 0
    assert engine.tokenizer_path is None
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
    manifest = read_manifest(tiny_engine)
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
    manifest = read_manifest(tiny_engine)
    reseal(tiny_engine, files={**manifest["files"], "decode.onnx": entry})
    with pytest.raises(InputError, match="malformed"):
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
def test_a_manifest_that_is_none_is_refused(tiny_engine, content):
    (tiny_engine / "manifest.json").write_bytes(content)
    with pytest.raises(InputError):
        open_engine(tiny_engine)


def test_a_manifest_in_another_layout_is_refused(tiny_engine):
    path = tiny_engine / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_bytes())))
    with pytest.raises(InputError, match="changed"):
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


@pytest.mark.parametrize("target", [None, {}, {"backend": "tensorrt", "architecture": "sm_90"}])
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


@pytest.mark.parametrize(("dtype", "pages", "refused"), [
    ("float16", 19, True), ("bfloat16", 23, True), ("float16", 24, False), ("float32", 19, False)
])  # fmt: skip
def test_an_engine_of_16_bit_from_before_its_pages_were_rounded_up_is_refused(tiny_engine, dtype, pages, refused):
    config = json.loads((tiny_engine / "config.json").read_bytes())
    (bounds,) = (entry for entry in config["kv_compression"]["state"] if entry["name"] == "bounds.1")
    bounds["dtype"], bounds["shape"][-1] = dtype, pages
    rewrite(tiny_engine, config)
    if not refused:
        open_engine(tiny_engine)
        return
    with pytest.raises(
        InputError, match=rf"bounds\.1 has {pages} pages, expected a multiple of 8 in {dtype}"
    ) as caught:
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
    with pytest.raises(InputError, match=r"config\.json is incomplete"):
        open_engine(tiny_engine)


def test_an_engine_from_before_a_number_existed_has_its_default():
    parameters = small_models.resolve("rocketkv")
    recorded = {name: value for name, value in asdict(parameters).items() if name not in ADDED_LATER}
    assert parameters_from(recorded, "config.json") == parameters


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
