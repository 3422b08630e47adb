"""Tensor by tensor: right engines pass, a wrong one is named at the tensor where it goes wrong, Polygraphy reads on."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import helper

import kvc_trt
from kvc_trt import policies
from kvc_trt.backends.harness import StoredBlock
from kvc_trt.backends.torch.executor import TorchExecutor
from kvc_trt.cli.main import run
from kvc_trt.errors import InputError
from kvc_trt.methods.base.isolated_runs import page_bounds
from kvc_trt.models.cache_formats import CACHE_FORMATS
from kvc_trt.operators.schema import part_names
from kvc_trt.verify.codes.parts import CACHES, stored_parts
from kvc_trt.verify.rankings.index_lists import IndexComparison
from kvc_trt.verify.rungs import tensor_differences, tensor_runners
from tests.small_model import SMALL
from tests.stored_tables import parts_of

POLYGRAPHY = Path(sys.executable).parent / "polygraphy"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A RocketKV engine whose prompt is compacted and whose steps select, and leave the newest token out."""
    path = tmp_path_factory.mktemp("tensors") / "engine"
    return kvc_trt.build("retrieval-tiny", token_budget=64, by_length=False, output=path, verify=False)


def failed(report):
    return {rung.name: rung.checks[0].detail for rung in report.rungs if rung.status == "failed"}


@pytest.mark.slow
def test_a_right_engine_passes_and_polygraphy_goes_on_from_its_files(engine, tmp_path, capfd):
    arguments = [
        "verify",
        str(engine.path),
        "--level",
        "tensors",
        "--steps",
        "2",
        "-o",
        str(tmp_path / "out"),
        "--json",
    ]
    assert run(arguments) == 0
    report = json.loads(capfd.readouterr().out)
    others = ("lowered", "openvino", "torch")
    names = [f"{graph}: onnxruntime | {other}" for graph in ("prefill", "decode") for other in others]
    assert [rung["name"] for rung in report["rungs"]] == names
    assert all(rung["status"] == "passed" for rung in report["rungs"])
    files = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.json")}
    kinds = ("inputs", "onnxruntime", *others)
    assert files == {f"{graph}/{kind}.json" for graph in ("prefill", "decode") for kind in kinds}
    shown = polygraphy("inspect", "data", str(tmp_path / "out" / "prefill" / "torch.json"))
    assert "indices.0" in shown
    for command in report["next_commands"]:
        assert command.startswith("polygraphy run ")
        assert "Pass Rate: 100.00%" in polygraphy(*command.split()[1:])


def polygraphy(*arguments: str) -> str:
    done = subprocess.run([POLYGRAPHY, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["prefill", "decode"])
def test_a_wrong_rewriting_is_named_at_its_first_tensor(graph, engine, monkeypatch):
    """One normalisation of the second layer with another epsilon: everything before it is equal."""
    changed = []

    def spoil(model, target):
        has_token = any(value.name == "token" for value in model.graph.input)
        norms = [
            node for node in model.graph.node if node.op_type == "RMSNormalization" and "layers.1" in node.output[0]
        ]
        if has_token == (graph == "decode"):
            changed.append(norms[0].output[0])
            [epsilon] = [attribute for attribute in norms[0].attribute if attribute.name == "epsilon"]
            epsilon.f = 0.5
        return []

    monkeypatch.setattr(tensor_runners, "EXECUTABLE_PASSES", (*tensor_runners.EXECUTABLE_PASSES, spoil))
    found = failed(engine.verify("tensors", steps=2))
    assert list(found) == [f"{graph}: onnxruntime | lowered"]
    assert f"the first is {changed[0]}" in found[f"{graph}: onnxruntime | lowered"]


@pytest.mark.slow
def test_a_wrong_graph_is_named_against_another_executor(engine, monkeypatch, tmp_path, capfd):
    """The second layer stores half of the new key: the token is not read yet, but the cache differs."""
    read = tensor_runners.engine_graph

    def wrong(engine, graph):
        model = read(engine, graph)
        if graph == "decode":
            node = [node for node in model.graph.node if node.op_type == "KvcHybridAttention"][1]
            half = onnx.helper.make_tensor("half", onnx.TensorProto.FLOAT, [], [0.5])
            place = list(model.graph.node).index(node)
            model.graph.node.insert(place, onnx.helper.make_node("Mul", [node.input[1], "half"], ["halved"]))
            model.graph.node.insert(place, onnx.helper.make_node("Constant", [], ["half"], value=half))
            model.graph.node[place + 2].input[1] = "halved"
        return model

    monkeypatch.setattr(tensor_runners, "engine_graph", wrong)
    assert run(["verify", str(engine.path), "--level", "tensors", "--steps", "1"]) == 1
    streams = capfd.readouterr()
    assert "decode: onnxruntime | openvino: tensors beyond the bar" in streams.err
    assert "the first is k_cache_out.1 in step 1" in streams.err
    assert "lowered: tensors beyond" not in streams.err


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "other", "left_out"),
    [
        ({"policy": "full"}, "lowered", 0),
        ({"policy": "sparq"}, "lowered", 0),
        ({"policy": "rocketkv", "weights": "int8"}, "inlined", 0),
        ({"policy": "rocketkv", "layer_budget": "squeeze-online"}, "lowered", 1),
    ],
)
def test_every_kind_of_engine_has_something_to_compare(settings, other, left_out, tmp_path):
    engine = kvc_trt.build("retrieval-tiny", output=tmp_path / "engine", verify=False, token_budget=64, **settings)
    report = engine.verify("tensors", steps=1)
    assert report.passed
    assert f"decode: onnxruntime | {other}" in [rung.name for rung in report.rungs]
    assert len(report.left_out) == left_out


@pytest.mark.slow
@pytest.mark.parametrize("proven", [True, False])
def test_other_tokens_are_a_difference_unless_they_are_a_proven_near_tie(proven, engine, monkeypatch):
    """Tensors that follow from a near-tie in layer 1 are not judged; layer 0 and layer 1's own query are."""
    exposed = TorchExecutor.exposed

    def swapped(self, name):
        values = exposed(self, name).copy()
        if name == "selected.1":
            values[0, 0, 0] += 1
        if name == "attended.1":
            values[0, 0] += 1
        return values

    monkeypatch.setattr(TorchExecutor, "exposed", swapped)
    verdict = (
        IndexComparison(1, near_ties=1, swapped_tokens=1) if proven else IndexComparison(1, wrong=("lower score",))
    )
    monkeypatch.setattr(tensor_differences, "compare_step", lambda *given, **options: (verdict, 0.0))
    report = engine.verify("tensors", steps=1)
    assert report.passed is proven
    if proven:
        assert report.near_ties.lists_admitted == 2
        [check, _] = report.rungs[-1].checks
        assert "follow from choices that rounding decided" in check.note
    else:
        assert "the first is model.layers.1.attended" in failed(report)["decode: onnxruntime | torch"]


def test_fp8_bounds_may_differ_as_far_as_the_keys_of_each_side_say():
    parameters = policies.resolve(
        "hybrid", model=SMALL, token_budget=32, max_input_len=60, max_output_len=4, fp8_bounds=True
    )
    engine = SimpleNamespace(model=SMALL, parameters=parameters)
    judge = tensor_differences.Judge("decode", None, engine, (), None, 1e-4, None)
    keys = np.full((1, 2, parameters.capacity, SMALL.head_size), 1.25, np.float32)  # an fp8 number
    feed = {"cache_lengths": np.full((SMALL.num_hidden_layers, 1), 40)}

    def side(keys):
        bounds = page_bounds(keys, np.array([41]), parameters.page_size, fp8=True)
        return {"k_cache_out.1": keys, "bounds_out.1": bounds}

    base, other = side(keys), side(np.nextafter(keys, np.float32(2)))
    assert not np.array_equal(base["bounds_out.1"], other["bounds_out.1"])
    assert judge._rounded(feed, base, other) == {"bounds_out.1"}
    assert judge._rounded(feed, base, side(keys)) == set()
    other["bounds_out.1"][0, 0, 0, 0] += 1
    assert judge._rounded(feed, base, other) == set()


class TestCodes:
    """Codes may differ by as much as the keys and values of each side allow; what follows from them is not compared."""

    @pytest.fixture
    def judge(self):
        parameters = policies.resolve(
            "full", model=SMALL, token_budget=32, max_input_len=60, max_output_len=4, kv_cache="int8"
        )
        node = helper.make_node("Step", ["key", "value"], ["attended", "k_cache_out.1", "k_scale_out.1"])
        graph = helper.make_graph([node, helper.make_node("Relu", ["attended"], ["after"])], "g", [], [])
        engine = SimpleNamespace(model=SMALL, parameters=parameters)
        block = StoredBlock(1, "key", "value")
        return tensor_differences.Judge("decode", helper.make_model(graph), engine, (), None, 1e-4, None, [block])

    @pytest.fixture
    def sides(self):
        """Caches before a step, and two sides after it, between whose keys a code has its edge."""
        rng = np.random.default_rng(0)
        vectors = rng.standard_normal((2, 1, 2, 64, SMALL.head_size), np.float32)
        key, value = (rng.standard_normal((1, 2, SMALL.head_size), np.float32) for _ in range(2))
        key[0, 0, :2] = 127, 2.5  # the scale is 1
        other = key.copy()
        other[0, 0, 1] = np.nextafter(np.float32(2.5), np.float32(3))
        form = CACHE_FORMATS["int8"]
        feed = {f"{name}.1": part for name, part in parts_of(*vectors, "int8").items()}

        def side(key):
            found = {"key": key, "value": value}
            for tensor, exact in zip(CACHES, (key, value), strict=True):
                for name, new in zip(part_names(tensor, form.keys), stored_parts(exact, form.keys), strict=True):
                    after = feed[f"{name}.1"].copy()
                    after[:, :, 40] = new
                    found[f"{name}_out.1"] = after
            return found

        return feed, side(key), side(other)

    def test_tensors_that_follow_from_a_flipped_code_are_not_compared(self, judge, sides):
        feed, base, other = sides
        assert (base["k_cache_out.1"] != other["k_cache_out.1"]).sum() == 1
        assert judge._flipped(feed, base, other) == {"attended", "k_cache_out.1", "k_scale_out.1", "after"}
        assert judge._flipped(feed, base, base) == set()

    @pytest.mark.parametrize(("tensor", "slot"), [("k_cache_out.1", 40), ("k_cache_out.1", 7), ("k_scale_out.1", 40)])
    def test_a_side_whose_codes_are_not_its_own_keys_is_compared(self, tensor, slot, judge, sides):
        feed, base, other = sides
        other[tensor][0, 1, slot, 0] += 1
        assert judge._flipped(feed, base, other) == set()

    def test_a_side_that_does_not_show_its_keys_is_compared(self, judge, sides):
        feed, base, other = sides
        del other["key"]
        assert judge._flipped(feed, base, other) == set()


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_an_engine_whose_caches_have_a_format_passes(form, tmp_path):
    engine = kvc_trt.build("retrieval-tiny", output=tmp_path / "engine", verify=False, token_budget=64, kv_cache=form)
    report = engine.verify("tensors", steps=1)
    assert report.passed
    assert [rung.name for rung in report.rungs] == [
        f"{graph}: onnxruntime | {other}"
        for graph in ("prefill", "decode")
        for other in ("lowered", "openvino", "torch")
    ]


@pytest.mark.slow
def test_an_engine_with_fp8_bounds_passes(tmp_path):
    engine = kvc_trt.build("retrieval-tiny", output=tmp_path / "engine", verify=False, token_budget=64, fp8_bounds=True)
    assert engine.verify("tensors", steps=1).passed


@pytest.mark.slow
def test_nan_differs_from_every_number(engine, monkeypatch):
    exposed = TorchExecutor.exposed
    broken = "attended.2"
    monkeypatch.setattr(
        TorchExecutor, "exposed", lambda self, name: exposed(self, name) * (np.nan if name == broken else 1)
    )
    assert "model.layers.2.attended" in failed(engine.verify("tensors", steps=1))["decode: onnxruntime | torch"]


def test_without_polygraphy_the_command_that_installs_it_is_named(engine, monkeypatch, capfd):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "polygraphy" else find(name, *rest)
    )
    assert run(["verify", str(engine.path), "--level", "tensors"]) == 3
    streams = capfd.readouterr()
    assert "Polygraphy, which is not installed" in streams.err
    assert "hint: pip install 'kvc-trt[polygraphy]'" in streams.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", "3"], "--samples does not go with --level tensors"),
        (["--steps", "0"], "--steps is 0"),
        (["--steps", "999"], "--steps is 999"),
    ],
)
def test_wrong_usage_is_refused(arguments, message, engine, capfd):
    assert run(["verify", str(engine.path), "--level", "tensors", *arguments]) == 2
    assert message in capfd.readouterr().err


def test_a_directory_with_another_level_is_refused(engine, tmp_path):
    with pytest.raises(InputError, match="directory goes with level tensors"):
        engine.verify("quick", directory=tmp_path)
