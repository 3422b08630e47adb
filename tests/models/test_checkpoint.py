from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest

from kvc_trt.errors import LONGEST_MESSAGE, InputError
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.models.formats import read_model_config
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.models.sources.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from kvc_trt.models.sources.safetensors_file import TensorPlan, write_safetensors
from kvc_trt.models.sources.tokenizer import TOKENIZER_FILES
from kvc_trt.models.weights import check_weights

HALVES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def plans(source, names):
    return [TensorPlan(name, "float32", source.shape(name), lambda name=name: source.read(name)) for name in names]


@pytest.fixture
def single(tmp_path, tiny_config, tiny_fields):
    directory = tmp_path / "single"
    directory.mkdir()
    source = RandomWeights(tiny_config(), 0)
    write_safetensors(directory / SINGLE_FILE, plans(source, source.names()))
    (directory / "config.json").write_text(json.dumps(tiny_fields()))
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture
def sharded(tmp_path, tiny_config, tiny_fields):
    directory = tmp_path / "sharded"
    directory.mkdir()
    source = RandomWeights(tiny_config(), 0)
    names = source.names()
    weight_map = {}
    for file, part in zip(HALVES, (names[:9], names[9:]), strict=True):
        write_safetensors(directory / file, plans(source, part))
        weight_map |= dict.fromkeys(part, file)
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(tiny_fields()))
    return directory


def edit_index(directory, change):
    index = json.loads((directory / INDEX_FILE).read_text())
    change(index["weight_map"])
    (directory / INDEX_FILE).write_text(json.dumps(index))


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_reads_the_same_tensors_from_one_file_and_from_shards(kind, request, tiny_config):
    checkpoint = Checkpoint(request.getfixturevalue(kind))
    source = RandomWeights(tiny_config(), 0)
    check_weights(checkpoint.config, checkpoint)
    assert checkpoint.config == tiny_config()
    assert sorted(checkpoint.names()) == sorted(source.names())
    for name in source.names():
        assert checkpoint.dtype(name) == "float32"
        np.testing.assert_array_equal(checkpoint.read(name), source.read(name))
        np.testing.assert_array_equal(checkpoint.read_rows(name, 3, 7), source.read_rows(name, 3, 7))


@pytest.mark.parametrize(
    ("matrices", "norms"), [("bfloat16", "float32"), ("float16", "bfloat16"), ("float32", "float16")]
)
def test_the_type_of_most_floats_is_the_dtype_that_a_configuration_does_not_state(
    matrices, norms, tmp_path, tiny_config, tiny_fields
):
    """Codes, such as MXFP4's, have more bytes here, and are no floats."""
    source = RandomWeights(tiny_config(), 0)

    def plan(name):
        dtype = matrices if len(source.shape(name)) == 2 else norms
        return TensorPlan(name, dtype, source.shape(name), lambda: source.read(name).astype(numpy_dtype(dtype)))

    codes = TensorPlan("blocks", "uint8", (1 << 20,), lambda: np.zeros(1 << 20, np.uint8))
    write_safetensors(tmp_path / SINGLE_FILE, [codes, *map(plan, source.names())])
    for stated in (None, "float16"):
        fields = tiny_fields() if stated is None else tiny_fields(torch_dtype=stated)
        (tmp_path / "config.json").write_text(json.dumps(fields))
        expected = stated or matrices
        assert Checkpoint(tmp_path).config == tiny_config(dtype=expected)
        assert read_model_config(tmp_path)[0] == tiny_config(dtype=expected)
    (tmp_path / SINGLE_FILE).unlink()
    (tmp_path / "config.json").write_text(json.dumps(tiny_fields()))
    assert read_model_config(tmp_path)[0].dtype == "float32"


def test_a_plan_without_all_shards_does_not_ask_them_for_their_dtype(sharded):
    assert read_model_config(sharded)[0].dtype == "float32"
    (sharded / HALVES[1]).unlink()
    assert read_model_config(sharded)[0].dtype == "float32"


def test_tokenizer_files_are_those_that_exist(single, sharded):
    assert Checkpoint(single).tokenizer_path == single / "tokenizer.json"
    assert Checkpoint(sharded).tokenizer_path is None
    (single / "tokenizer_config.json").write_text("{}")
    (single / "chat_template.jinja").write_text("{{ messages }}")
    names = [path.name for path in Checkpoint(single).tokenizer_files()]
    assert names == ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_a_file_beside_the_weights_has_a_limit(single, name):
    with (single / name).open("wb") as file:
        file.truncate(TOKENIZER_FILES[name] + 1)
    with pytest.raises(InputError, match=rf"{name}: .*[,;] expected at most"):
        Checkpoint(single).tokenizer_files()


def test_fingerprint_sees_every_byte_of_weights_and_config(single, tiny_fields):
    before = Checkpoint(single).fingerprint()
    assert Checkpoint(single).fingerprint() == before
    (single / "config.json").write_text(json.dumps(tiny_fields(rms_norm_eps=1e-6)))
    other_config = Checkpoint(single).fingerprint()
    content = bytearray((single / SINGLE_FILE).read_bytes())
    content[-1] ^= 1
    (single / SINGLE_FILE).write_bytes(content)
    assert len({before, other_config, Checkpoint(single).fingerprint()}) == 3


def test_pickled_weights_are_refused_with_the_way_out(single):
    (single / SINGLE_FILE).rename(single / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin.*safetensors") as caught:
        Checkpoint(single)
    assert "save_pretrained" in (caught.value.hint or "")


def test_pickled_shards_are_refused(sharded):
    edit_index(sharded, lambda weight_map: weight_map.update({"lm_head.weight": "pytorch_model.bin"}))
    with pytest.raises(InputError, match="safetensors files only"):
        Checkpoint(sharded)


def test_missing_files_of_a_checkpoint_are_named(single, tmp_path):
    with pytest.raises(InputError, match="not a directory"):
        Checkpoint(tmp_path / "absent")
    (single / SINGLE_FILE).unlink()
    with pytest.raises(InputError, match=r"neither model\.safetensors nor"):
        Checkpoint(single)
    (single / "config.json").unlink()
    with pytest.raises(InputError, match=r"config\.json"):
        Checkpoint(single)


@pytest.mark.parametrize(
    "name",
    ["../other.safetensors", "/etc/passwd.safetensors", "sub/x.safetensors", "..\\x.safetensors", "a\0.safetensors"],
)
def test_index_entries_that_lead_elsewhere_are_refused(sharded, name):
    (sharded.parent / "other.safetensors").write_bytes((sharded / HALVES[0]).read_bytes())
    edit_index(sharded, lambda weight_map: weight_map.update({"lm_head.weight": name}))
    with pytest.raises(InputError, match="plain file name"):
        Checkpoint(sharded)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update({"lm_head.weight": HALVES[0]}), "is not in"),
        (lambda m: m.update({"ghost.weight": HALVES[0]}), "is not in"),
        (lambda m: m.pop("lm_head.weight"), "not in the index"),
        (lambda m: m.update({"lm_head.weight": 3}), "weight_map"),
        (lambda m: m.clear(), "weight_map"),
        (lambda m: m.update({"lm_head.weight": "absent.safetensors"}), "missing"),
    ],
)
def test_an_index_that_lies_is_refused(sharded, change, words):
    edit_index(sharded, change)
    with pytest.raises(InputError, match=words):
        Checkpoint(sharded)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', "[" * 100_000, '{"weight_map": NaN}'])
def test_a_broken_index_is_refused(sharded, content):
    (sharded / INDEX_FILE).write_text(content)
    with pytest.raises(InputError):
        Checkpoint(sharded)


def test_an_index_of_absurd_size_is_not_read(sharded, monkeypatch):
    monkeypatch.setattr("kvc_trt.models.sources.checkpoint.LARGEST_INDEX", 100)
    with pytest.raises(InputError, match="expected at most 100"):
        Checkpoint(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded):
    shutil.copy(sharded / HALVES[0], sharded / "third.safetensors")
    edit_index(sharded, lambda m: m.update({"model.embed_tokens.weight": "third.safetensors"}))
    with pytest.raises(InputError, match="two shards"):
        Checkpoint(sharded)


@pytest.mark.parametrize("name", [SINGLE_FILE, "config.json", "tokenizer.json"])
def test_links_that_leave_the_directory_are_refused(single, name):
    outside = single.parent / "outside"
    (single / name).rename(outside)
    (single / name).symlink_to(outside)
    with pytest.raises(InputError, match="outside of the checkpoint"):
        Checkpoint(single).tokenizer_files()


def test_links_inside_the_directory_and_to_the_directory_are_fine(single):
    (single / SINGLE_FILE).rename(single / "blob")
    (single / SINGLE_FILE).symlink_to("blob")
    link = single.parent / "link"
    link.symlink_to(single)
    assert Checkpoint(link).names()


def test_a_dangling_link_and_a_pipe_are_refused(single):
    (single / "tokenizer.json").unlink()
    (single / SINGLE_FILE).rename(single / "kept")
    os.mkfifo(single / SINGLE_FILE)
    with pytest.raises(InputError, match="not a regular file"):
        Checkpoint(single)
    (single / SINGLE_FILE).unlink()
    (single / SINGLE_FILE).symlink_to("loop")
    (single / "loop").symlink_to(SINGLE_FILE)
    with pytest.raises(InputError):
        Checkpoint(single)


def test_the_hubs_cache_layout_is_read_and_no_other_repository_of_it(single):
    repository = single.parent / "models--org--name"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / ("0" * 40)
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name in (SINGLE_FILE, "config.json", "tokenizer.json"):
        (single / name).rename(blobs / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert Checkpoint(snapshot).tokenizer_path == snapshot / "tokenizer.json"
    stranger = single.parent / "models--org--other" / "blobs"
    stranger.mkdir(parents=True)
    (blobs / SINGLE_FILE).rename(stranger / SINGLE_FILE)
    (snapshot / SINGLE_FILE).unlink()
    (snapshot / SINGLE_FILE).symlink_to(stranger / SINGLE_FILE)
    with pytest.raises(InputError, match="outside"):
        Checkpoint(snapshot)


def test_close_lets_go_of_the_files(single):
    checkpoint = Checkpoint(single)
    checkpoint.close()
    with pytest.raises(ValueError, match="closed"):
        checkpoint.read("lm_head.weight")


@pytest.mark.parametrize("name", ["\ud800.safetensors", "a" * 5000 + ".safetensors", "a\x1b[2J.safetensors"])
def test_a_name_in_an_index_that_no_file_has_is_one_plain_line(sharded, name):
    edit_index(sharded, lambda weight_map: weight_map.update({"lm_head.weight": name}))
    with pytest.raises(InputError) as caught:
        Checkpoint(sharded)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) <= LONGEST_MESSAGE
