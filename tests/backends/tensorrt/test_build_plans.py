"""The builder code on NVIDIA's other builder (TensorRT-RTX), which builds plans without a GPU: whole graphs of a small
model with their weights, the Python plugins. Its plans are not engines of kvc-trt, and nothing here calls them so."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import numpy as np
import onnx
import pytest

from kvc_trt.backends.tensorrt.building.profiles import decode_profiles, prefill_profiles
from kvc_trt.backends.tensorrt.module import load_tensorrt
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.graph.build import build_decode, build_prefill
from kvc_trt.graph.weights import EMBEDDING, GraphWeights, write_weights
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.models.sources.safetensors_file import SafetensorsFile
from tests.backends.tensorrt import rtx
from tests.graph.small_models import LLAMA, resolve
from tests.models.fp8_weights import fp8_source

pytestmark = pytest.mark.tensorrt
ROOT = Path(__file__).resolve().parents[3]
BATCH = 12
"""More than one range of batch sizes."""
OTHER = bytes(range(1, 65))
"""The first bytes of the embedding in another weight file."""


def as_json(profiles):
    return [[astuple(profile.batch), profile.sequence and astuple(profile.sequence)] for profile in profiles]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Graphs and weights of a RocketKV engine in bf16, with one dense layer."""
    if (reason := rtx.missing()) is not None:
        pytest.skip(reason)
    path = tmp_path_factory.mktemp("engine")
    save_graphs(path, RandomWeights(LLAMA, 0), "bf16")
    for name, wide in (("fp8", "nothing"), ("mixed", "layers.0.*q_proj|down_proj")):
        save_graphs(path / name, fp8_source(LLAMA, wide=wide), "fp8")
    return path


def save_graphs(path, source, precision):
    path.mkdir(exist_ok=True)
    parameters = resolve("rocketkv", skip_layers=1)
    file = path / "weights.safetensors"
    write_weights(LLAMA, source, file, weights=precision, length=parameters.max_sequence_len)
    weights = GraphWeights(file)
    onnx.save(build_prefill(LLAMA, parameters, weights=weights), path / "prefill.onnx")
    onnx.save(build_decode(LLAMA, parameters, weights=weights), path / "decode.onnx")


def changed(directory, name, change):
    """Return a weight file of the same name elsewhere."""
    other = directory / name / "weights.safetensors"
    other.parent.mkdir()
    other.write_bytes(change((directory / "weights.safetensors").read_bytes()))
    return str(other)


def with_other_embedding(directory, data):
    place = GraphWeights(directory / "weights.safetensors").stored(EMBEDDING)
    return data[: place.offset] + OTHER + data[place.offset + 64 :]


def requests(directory, cache):
    """Return all requests, for one process: NAME -> the differences from a plain build of the decode graph."""
    place = GraphWeights(directory / "weights.safetensors").stored(EMBEDDING)
    embedding = (directory / "weights.safetensors").read_bytes()[place.offset : place.offset + 64]
    elsewhere = directory / "other.safetensors"
    elsewhere.write_bytes((directory / "weights.safetensors").read_bytes())
    return {
        "prefill": {"graph": str(directory / "prefill.onnx"), "profiles": as_json(prefill_profiles(250, BATCH))},
        "decode": {"cache": str(cache), "contains": [embedding.hex(), OTHER.hex()]},
        "settings": {"settings": True},
        "other weights": {
            "weights": changed(directory, "other", lambda data: with_other_embedding(directory, data)),
            "contains": [embedding.hex(), OTHER.hex()],
            "cache": changed(directory, "cache", lambda data: b"no timings"),
        },
        "short weights": {"weights": changed(directory, "short", lambda data: data[:-1000])},
        "weights elsewhere": {"weights": str(elsewhere)},
        "no weights": {"weights": None},
        "interrupt": {"stop": "interrupt"},
        "disk": {"stop": "disk"},
        "missing plugin": {"without": ["KvcHybridAttention"]},
        "impossible profile": {"profiles": [[[4, 2, 8], None]]},
        "fp8 decode": in_fp8(directory / "fp8", "decode", decode_profiles(BATCH)),
        "fp8 prefill": in_fp8(directory / "fp8", "prefill", prefill_profiles(250, BATCH)),
        "mixed decode": in_fp8(directory / "mixed", "decode", decode_profiles(BATCH)),
    }


def in_fp8(directory, graph, profiles):
    file = directory / "weights.safetensors"
    matrix = SafetensorsFile(file).read("model.layers.2.self_attn.o_proj.weight")
    return {
        "graph": str(directory / f"{graph}.onnx"),
        "weights": str(file),
        "profiles": as_json(profiles),
        "layers": True,
        "contains": [np.ascontiguousarray(matrix.T).tobytes()[:512].hex()],
    }


_answers: dict = {}


@pytest.fixture
def answers(directory, emulation, tmp_path_factory):
    """The answers to all requests, computed once."""
    if not _answers:
        _answers.update(ask(directory, emulation, tmp_path_factory))
    return _answers


def ask(directory, emulation, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache") / "new" / "timings.bin"
    usual = {
        "graph": str(directory / "decode.onnx"),
        "weights": str(directory / "weights.safetensors"),
        "kernels": str(emulation.path),
        "profiles": as_json(decode_profiles(BATCH)),
    }
    file = tmp_path_factory.mktemp("requests") / "requests.json"
    file.write_text(json.dumps({name: usual | changes for name, changes in requests(directory, cache).items()}))
    command = [sys.executable, "-m", "tests.backends.tensorrt.plan_program", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, f"ended with {done.returncode}:\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1]) | {"cache": cache}


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "plugins"),
    [("prefill", {"KvcCompact": 2}), ("decode", {"KvcDenseAttention": 1, "KvcHybridAttention": 2})],
)
def test_each_graph_becomes_a_plan_with_its_plugins(answers, directory, name, plugins):
    answer = answers[name]
    assert answer.get("error") is None, answer
    assert answer["plugins"] == plugins
    assert answer["bytes"] > 0.9 * (directory / "weights.safetensors").stat().st_size
    assert any(step == "name_plugins" for step, _ in answer["notes"])


def test_weights_come_from_the_file_that_is_named(answers):
    assert answers["decode"]["contained"] == [True, False]
    assert answers["other weights"]["contained"] == [False, True]


@pytest.mark.parametrize(
    ("name", "matrices"),
    [
        # queries, keys and values are one matrix of a step, gates and ups another; a prompt's products are apart
        ("fp8 decode", 3 * 4),
        ("fp8 prefill", 3 * 7),
        # layer 0 has one of the three in bf16, so its two others are dequantised apart; no layer has an fp8 down_proj
        ("mixed decode", 3 * 3 + 1),
    ],
)
def test_matrices_in_fp8_are_dequantised_to_bf16_by_a_layer_each(answers, name, matrices):
    answer = answers[name]
    assert answer.get("error") is None, answer
    assert answer["layers"]["DEQUANTIZE BF16"] == matrices
    assert not [kind for kind in answer["layers"] if kind.startswith("DEQUANTIZE") and not kind.endswith("BF16")]
    assert answer["layers"]["CONSTANT FP8"] == matrices
    assert answer["contained"] == [True], "the plan keeps the matrices in fp8, transposed"


def test_the_builders_phases_reach_the_progress(answers):
    phases = {name: done for name, done in answers["decode"]["tasks"].items() if name.startswith("TensorRT: ")}
    assert phases
    assert all(0 < done <= total for total, done in phases.values()), phases
    assert answers["decode"]["open"] == 0


def test_the_builder_is_configured_as_intended(answers):
    assert answers["settings"] == {
        "aliases": True,
        "tf32": False,
        "verbosity": "DETAILED",
        "profiles": len(decode_profiles(BATCH)),
        "strongly_typed": True,
    }


def test_timings_are_kept_whole_and_damaged_ones_replaced(answers, directory):
    cache = answers["cache"]
    assert [path.name for path in cache.parent.iterdir()] == ["timings.bin"]
    assert answers["other weights"].get("error") is None
    assert (directory / "cache" / "weights.safetensors").read_bytes()[:10] == cache.read_bytes()[:10] != b"no timings"


def test_an_interrupt_inside_of_the_builder_stops_it_and_comes_out(answers):
    assert answers["interrupt"]["error"] == "KeyboardInterrupt"
    assert answers["interrupt"]["open"] == 0


def test_a_full_disk_comes_out_as_what_it_is(answers):
    assert (answers["disk"]["error"], "No space left" in answers["disk"]["message"]) == ("OSError", True)


def test_a_missing_plugin_fails_the_build(answers):
    answer = answers["missing plugin"]
    assert answer["error"] == "UnsupportedEnvironment"
    assert "parser cannot parse the decode graph: " in answer["message"]
    assert "Plugin not found" in answer["message"]
    assert answer["bytes"] == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short weights", "weights.safetensors is too short: expected at least"),
        ("weights elsewhere", "is stored in weights.safetensors, expected other.safetensors"),
        ("no weights", "expected it in the graph"),
    ],
)
def test_weights_that_do_not_fit_the_graph_are_refused(answers, name, message):
    assert answers[name]["error"] == "InputError"
    assert message in answers[name]["message"]


def test_an_impossible_profile_fails_the_build(answers):
    assert answers["impossible profile"]["error"] == "UnsupportedEnvironment"
    assert answers["impossible profile"]["bytes"] == 0


def test_the_stand_in_is_not_mistaken_for_tensorrt(monkeypatch):
    rtx.as_tensorrt(monkeypatch)
    with pytest.raises(UnsupportedEnvironment, match=r"TensorRT 1\.7\.\S+ is too old: expected 10\.15 or newer"):
        load_tensorrt()
