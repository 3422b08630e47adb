"""The comparison with other engines: its measurements, the counts, the page, and how a run resumes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import machine, store
from benchmarks.idle import Others
from benchmarks.peers import __main__ as peers
from benchmarks.peers import artefacts, formats_page, page, rounds
from benchmarks.peers.bars import bars, bars_of_formats
from benchmarks.peers.contenders import CONTENDERS, OF_FORMATS
from benchmarks.peers.floors import floor_ms, step_cost
from benchmarks.peers.points import CORE, FORMATS, FULL, QUICK, Measurement, Point, measurements
from benchmarks.peers.runs import EMPTY, FORMATS_NAMES, NAME, Runs, formats_name
from benchmarks.peers.shapes import M8, SHAPES, read_config, write_checkpoint
from benchmarks.peers.summary import by_point, row
from benchmarks.peers.worker import prompts

OURS, EVICTION, DENSE = (
    next(one for one in CONTENDERS if one.name == name)
    for name in ("kvc-trt rocketkv, bodies", "OpenVINO GenAI eviction, f32", "OpenVINO GenAI dense, f32")
)
POINT = Point("m8", "int4", 4096)


def run(first_token: float, token: float, others: float = 0.0, peak: int = 2**30):
    return {
        "first_token_seconds": first_token, "token_ms": [token, token, 3 * token], "peak_resident_bytes": peak,
        "others_share": others, "load_seconds": 1.0, "wall_seconds": 2.0,
    }  # fmt: skip


def entry(contender=OURS, runs=(), point=POINT):
    return {
        "shape": point.shape_name, "weights": point.weights, "context": point.context, "batch": point.batch,
        "contender": contender.name, "runner": contender.runner, "full_precision": contender.full_precision,
        "reads": contender.reads, "cache": contender.cache, "disk_bytes": 3 << 20, "floor_ms": 2.0,
        "runs": list(runs),
    }  # fmt: skip


def test_every_contender_meets_the_others_at_some_point_and_names_are_unique():
    assert len({one.name for one in CONTENDERS}) == len(CONTENDERS)
    met = {one.contender.name for one in measurements(CORE, everybody=False)}
    assert met == {one.name for one in CONTENDERS}
    assert set(QUICK) < set(CORE) < set(FULL)


def test_long_contexts_of_the_short_selection_have_the_core_alone():
    found = measurements((Point("m8", "fp32", 16384),), everybody=False)
    assert all(one.contender.core for one in found)
    assert len(measurements((Point("m8", "fp32", 16384),), everybody=True)) > len(found)


def test_every_point_has_a_shape_and_keys_are_unique():
    every = measurements(FULL, everybody=True)
    assert {one.point.shape_name for one in every} == set(SHAPES)
    assert len({one.key for one in every}) == len(every)


def test_a_floor_counts_the_cache_that_the_contender_reads():
    eviction, dense, ours = (step_cost(Measurement(POINT, one)) for one in (EVICTION, DENSE, OURS))
    layers, pair = 8, 2 * 4 * 64
    assert dense.row_bytes == layers * 4096 * pair
    assert eviction.row_bytes == layers * 512 * pair
    assert 0.9 * layers * 512 * pair * 4 < ours.row_bytes < 1.1 * layers * 512 * pair * 4
    bandwidth = {"copy_bytes_per_second": 1e9, "read_bytes_per_second": 2e9}
    assert floor_ms(Measurement(POINT, DENSE), bandwidth) == pytest.approx(1e3 * dense.bytes(1) / 2e9)


def test_a_busy_run_counts_only_where_there_is_no_quiet_one():
    found = row(entry(runs=[run(1.0, 10.0), run(3.0, 30.0, others=0.2), run(2.0, 20.0)]))
    assert (found.first_token_seconds, found.token_ms, found.runs, found.quiet) == (1.5, 15.0, 2, True)
    assert (found.first_token_range, found.token_range) == ((1.0, 2.0), (10.0, 20.0))
    busy = row(entry(runs=[run(3.0, 30.0, others=0.2)]))
    assert (busy.token_ms, busy.quiet, busy.percent_of_floor) == (30.0, False, pytest.approx(100 * 2 / 30))


def test_rows_of_a_point_are_sorted_by_the_step():
    found = by_point([entry(runs=[run(1, 10.0)]), entry(EVICTION, [run(1, 8.0)])])
    assert [one.contender for one in found["m8", "int4", 4096, 1]] == [EVICTION.name, OURS.name]


@pytest.fixture
def data():
    return {
        "machine": {
            "commit": "abc", "device": "A processor", "vector_extensions": ["avx2"], "usable_cores": 2,
            "time_utc": "2026-01-02T03:04:05+00:00", "versions": {"kvc_trt": "0.1", "onnxruntime": "1.31"},
        },
        "threads": 2,
        "bandwidth": {"copy_bytes_per_second": 30e9, "read_bytes_per_second": 40e9},
        "versions": {"openvino": "2026.4.1"},
        "measurements": {
            "a": entry(runs=[run(5.2, 8.4, peak=3 << 30)]),
            "b": entry(EVICTION, [run(3.0, 7.9, others=0.5)]),
        },
        "failed": {"m8/int4/4096/1/llama.cpp": "no such module"},
    }  # fmt: skip


def test_the_page_has_the_figures_of_the_results_and_says_what_failed(data, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "_PAGE", tmp_path / "peers.md")
    text = page.write(data).read_text()
    assert "| kvc-trt rocketkv, bodies | 5.20 | 8.40 | 2.00 | 24 % | 3.00 | 3 | 1 |" in text
    assert "| OpenVINO GenAI eviction, f32 † | 3.00 | 7.90 | - | - |" in text
    beside = "5.20 s (kvc-trt rocketkv, bodies) | 3.00 s (OpenVINO GenAI eviction, f32) | 1.73 | 1.05 | **missed** |"
    assert f"| m8, int4, 4,096 tokens | first token, float32 | {beside}" in text
    assert "7.90 ms (OpenVINO GenAI eviction, f32) | 1.06 | 0.80, or 1.15 x floor | **missed** |" in text
    assert "llama.cpp: no such module" in text
    assert "40.0 GB/s read" in text
    assert "![" not in text


def test_the_mark_of_a_busy_processor_is_explained_where_a_row_has_it(data, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "_PAGE", tmp_path / "peers.md")
    explained = "\n† Others used more than 5% of the processor"
    assert explained in page.write(data).read_text()
    data["measurements"]["b"] = entry(EVICTION, [run(3.0, 7.9)])
    assert "†" not in page.write(data).read_text()


def test_the_page_is_that_of_the_results(tmp_path, monkeypatch):
    written = page._PAGE
    (tmp_path / "docs" / "results").mkdir(parents=True)
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(page, "_PAGE", tmp_path / "docs" / "results" / "peers.md")
    again = page.write(store.recorded(NAME, "make bench-peers"))
    for suffix in (".md", ".csv"):
        expected = again.with_suffix(suffix).read_text(encoding="utf-8")
        assert written.with_suffix(suffix).read_text(encoding="utf-8") == expected, "python -m benchmarks.peers --page"


def test_the_page_of_formats_is_that_of_its_results(tmp_path, monkeypatch):
    written = formats_page._PAGE
    monkeypatch.setattr(formats_page, "_PAGE", tmp_path / written.name)
    again = formats_page.write(formats_page.recorded())
    expected = again.read_text(encoding="utf-8")
    assert written.read_text(encoding="utf-8") == expected, "python -m benchmarks.peers --select formats --page"


def contender(name):
    return next(one for one in CONTENDERS if one.name == name)


def judged(*entries):
    return {one.what: (one.ratio, one.met) for one in bars(by_point(entries))}


def test_bfloat16_is_not_set_against_float32():
    found = judged(
        entry(runs=[run(2.0, 4.0)]), entry(DENSE, [run(2.5, 7.0)]),
        entry(contender("OpenVINO GenAI dense, default precision"), [run(1.0, 7.0)]),
    )  # fmt: skip
    assert found == {"first token, float32": (0.8, True)}
    both = judged(
        entry(contender("kvc-trt rocketkv, OpenVINO prefill bf16"), [run(1.5, 4.0)]),
        entry(contender("OpenVINO GenAI dense, default precision"), [run(1.0, 7.0)]),
    )  # fmt: skip
    assert both == {"first token, bfloat16 allowed": (1.5, False)}


def test_a_policy_that_keeps_everything_meets_no_bar_for_rocketkv():
    assert not judged(entry(contender("kvc-trt full, native operators"), [run(1, 1)]), entry(EVICTION, [run(2, 2)]))


@pytest.mark.parametrize(("step", "met"), [(6.4, True), (6.5, False), (2.3, True)])
def test_a_step_meets_its_bar_beside_the_eviction_or_beside_its_floor(step, met):
    peer = 8.0 if step > 3 else 2.0
    assert judged(entry(runs=[run(1, step)]), entry(EVICTION, [run(1, peer)]))["step, float32"][1] is met


def test_memory_and_disk_are_judged_on_the_larger_shape():
    large = Point("m1b", "int4", 4096)
    llama = contender("llama.cpp, flash attention off")
    found = judged(entry(runs=[run(1, 1, peak=5 << 30)], point=large), entry(llama, [run(1, 1, peak=4 << 30)], large))
    assert found == {"peak memory": (1.25, False), "disk": (1.0, True)}


def of_formats(name):
    return next(one for one in OF_FORMATS if one.name == name)


IN_8_BITS, IN_FLOAT32 = (of_formats(f"kvc-trt rocketkv, {name} cache") for name in ("int8", "float32"))
WHOLE_IN_8_BITS, WHOLE = (of_formats(f"kvc-trt full, {name} cache") for name in ("int8", "float32"))
THEIRS = of_formats("OpenVINO GenAI eviction, u8 cache")


def test_caches_of_8_bits_are_compared_with_openvinos_and_with_float32():
    every = {one.key for one in measurements(FORMATS, everybody=True, contenders=OF_FORMATS)}
    assert {Measurement(point, one).key for point in FORMATS for one in (IN_8_BITS, THEIRS)} < every
    long, batch = Point("m8", "int4", 16384), Point("m8", "int4", 16384, 8)
    assert {Measurement(long, one).key for one in (WHOLE_IN_8_BITS, WHOLE)} < every
    assert Measurement(batch, IN_FLOAT32).key in every


def test_an_engine_of_another_cache_format_is_another_artefact_with_less_to_read(tmp_path):
    place = artefacts.Workplace(tmp_path, tmp_path / "python", 2, "abc")
    found = [artefacts.artefact(Measurement(POINT, one), place).name for one in (WHOLE, WHOLE_IN_8_BITS)]
    assert found == ["m8-int4-full-4096", "m8-int4-full-4096-int8-cache"]
    whole, stored = (step_cost(Measurement(POINT, one)).row_bytes for one in (WHOLE, WHOLE_IN_8_BITS))
    assert stored / whole == (64 + 2) / (4 * 64)
    read, stored = (step_cost(Measurement(POINT, one)).row_bytes for one in (IN_FLOAT32, IN_8_BITS))
    assert 0.25 < stored / read < 0.4


def test_bars_of_formats_are_asked_where_the_prompt_is_long():
    def judged(context, batch):
        point = Point("m8", "int4", context, batch)
        times = ((IN_8_BITS, 3.0), (IN_FLOAT32, 4.0), (THEIRS, 5.0), (WHOLE_IN_8_BITS, 6.0), (WHOLE, 10.0))
        found = bars_of_formats(by_point([entry(one, [run(1, ms)], point) for one, ms in times]))
        return [(one.what, one.peer.contender, one.ratio, one.limit, one.met) for one in found]

    beside = [("first token", THEIRS.name, 1.0, 1.05, True), ("step", THEIRS.name, 0.6, 0.8, True)]
    assert judged(16384, 1) == [
        *beside, ("step", IN_FLOAT32.name, 0.75, None, True), ("step", WHOLE.name, 0.6, 0.5, False),
    ]  # fmt: skip
    assert judged(16384, 8)[2] == ("step", IN_FLOAT32.name, 0.75, 0.85, True)
    assert [limit for *_, limit, _ in judged(4096, 8)] == [1.05, 0.8, None, None]


def test_processors_have_results_of_their_own(data):
    names = {formats_name({"vector_extensions": found}) for found in (["avx2"], ["avx2", "avx512f"])}
    assert names == set(FORMATS_NAMES.values())
    data["machine"] |= {"commit": "abc-dirty", "vector_extensions": ["avx2"]}
    assert formats_page.recorded(beside=data) == {"AVX2": data}


def test_a_page_of_formats_without_results_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    with pytest.raises(SystemExit, match=r"peers-formats-avx2\.json; make bench-peers SELECT=formats measures"):
        formats_page.recorded()


def test_the_page_of_formats_has_the_bars_and_every_row(data, tmp_path, monkeypatch):
    monkeypatch.setattr(formats_page, "_PAGE", tmp_path / "peers-formats.md")
    data["measurements"] = {"a": entry(IN_8_BITS, [run(2, 3.0)]), "b": entry(THEIRS, [run(4, 6.0)])}
    text = formats_page.write({"AVX2": data}).read_text()
    beside = (
        "3.00 ms (kvc-trt rocketkv, int8 cache) | 6.00 ms (OpenVINO GenAI eviction, u8 cache) | 0.50 | 0.80 | met |"
    )
    assert f"| m8, int4, 4,096 tokens | step | {beside}" in text
    assert "| OpenVINO GenAI eviction, u8 cache | 4.00 | 6.00 | - |" in text
    assert "Not measured yet: m8, int8, 4,096 tokens; m8, int4, 16,384 tokens;" in text


def test_points_are_chosen_by_a_pattern_and_a_wrong_one_is_refused(capsys):
    chosen = peers._parser().parse_args(["--points", "tokens$"]).points
    assert {one.batch for one in FORMATS if chosen.search(str(one))} == {1}
    with pytest.raises(SystemExit, match="2"):
        peers._parser().parse_args(["--points", "m8 ("])
    assert "'m8 (' is no regular expression" in capsys.readouterr().err


def test_measurements_at_two_contexts_are_drawn_with_every_name(data, tmp_path, monkeypatch):
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "images").mkdir()
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(page, "_PAGE", tmp_path / "docs" / "results" / "peers.md")
    data["measurements"]["c"] = entry(runs=[run(50, 8.6)], point=replace(POINT, context=16384))
    text = page.write(data).read_text()
    assert "![peers-m8-int4-token-ms](../images/peers-m8-int4-token-ms.svg)" in text
    picture = (tmp_path / "docs" / "images" / "peers-m8-int4-first-token-seconds.svg").read_text()
    assert picture.count(OURS.name) == 3  # two points and the legend


def test_answers_stand_beside_those_of_rocketkv(data, tmp_path, monkeypatch):
    same = {"task": "niah", "mode": "query-aware", "length": 2048, "framing": "chat"}
    theirs = {**same, "point": "budget 128", "stored_tokens": 128, "scores": [1, 0, 1, 0]}
    ours = {**same, "policy": "rocketkv", "token_budget": 128, "scores": [1, 1, 1, 0, 0, 0]}
    for name, cell in (("peers-eviction", theirs), ("accuracy-smollm2", ours)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"cells": [cell]}))
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    monkeypatch.setattr(page, "_PAGE", tmp_path / "peers.md")
    expected = "| niah, 2,048 tokens, chat | budget 128 | 128 | 50.0 ± 28.9 (4) | 75.0 ± 25.0 (4) |"
    assert expected in page.write(data).read_text()


@pytest.fixture
def results(tmp_path, monkeypatch):
    record = {"commit": "abc", "device": "A", "usable_cores": 2}
    monkeypatch.setattr(machine, "record", lambda: dict(record))
    monkeypatch.setattr(store, "result_path", lambda name, found: tmp_path / f"{name}.json")
    return record


def test_a_run_goes_on_with_the_results_of_its_commit_alone(results, tmp_path):
    first = Runs.open(NAME, EMPTY, fresh=False)
    first.data["bandwidth"] = {"copy_bytes_per_second": 1e9}
    artefact = tmp_path / "model"
    artefact.write_bytes(b"12345")
    measurement = Measurement(POINT, OURS)
    first.add(measurement, artefact, {**run(1, 2), "versions": {"kernels": "bodies"}}, floor_ms=0.5)
    again = Runs.open(NAME, EMPTY, fresh=False)
    assert len(again.of(measurement)) == 1
    assert again.data["measurements"][measurement.key]["disk_bytes"] == 5
    assert again.data["versions"] == {"kernels": "bodies"}
    assert not Runs.open(NAME, EMPTY, fresh=True).of(measurement)
    results["commit"] = "other"
    assert not Runs.open(NAME, EMPTY, fresh=False).of(measurement)


def test_rounds_keep_to_their_minutes_and_repeat_a_busy_run(results, monkeypatch, tmp_path):
    found = Runs.open(NAME, EMPTY, fresh=True)
    chosen, made = [Measurement(POINT, one) for one in (OURS, EVICTION)], []

    def measure(measurement, to, place):
        made.append(measurement.contender.name)
        one = run(1, 2, others=0.5 if len(made) == 1 else 0.0)
        to.add(measurement, tmp_path, {**one, "versions": {}}, floor_ms=1.0)
        return one

    monkeypatch.setattr(rounds, "_measure", measure)
    assert rounds.measure_all(chosen, found, None, rounds=2, minutes=10)
    assert made == [OURS.name, OURS.name, EVICTION.name, EVICTION.name]
    assert rounds.estimate(chosen, found, 3) == 4.0
    assert not rounds.measure_all(chosen, found, None, rounds=3, minutes=0)


def test_a_measurement_that_cannot_run_is_noted_and_not_tried_again(results, tmp_path, monkeypatch):
    found = Runs.open(NAME, EMPTY, fresh=True)
    found.data["bandwidth"] = {"read_bytes_per_second": 1e9}
    place = artefacts.Workplace(tmp_path, tmp_path / "no-python", 1, "abc")
    monkeypatch.setattr(rounds, "make", lambda measurement, place: tmp_path)
    monkeypatch.setattr(artefacts.Workplace, "python", lambda self, ours: sys.executable)
    broken = Measurement(POINT, replace(OURS, runner="no_such_engine", name="broken"))
    assert rounds.measure_all([broken], found, place, rounds=2, minutes=5)
    assert "no_such_engine" in found.data["failed"][broken.key]
    assert not found.of(broken)


def test_engines_of_other_commits_are_dropped(tmp_path):
    place = artefacts.Workplace(tmp_path, tmp_path / "python", 2, "new")
    for commit in ("old", "new"):
        (tmp_path / "engines" / commit).mkdir(parents=True)
    artefacts.drop_other_engines(place)
    assert [folder.name for folder in (tmp_path / "engines").iterdir()] == ["new"]
    assert artefacts.artefact(Measurement(POINT, OURS), place).parent.name == "new"


def test_every_engine_gets_the_same_prompts():
    request = {"vocab_size": 100, "batch": 2}
    first, second = prompts(request, 50, seed=0)
    assert [first, second] == prompts(request, 50, seed=0)
    assert first != second
    assert min(first) >= 3
    assert max(first) < 100


def test_processor_share_of_other_programs_is_between_0_and_1():
    others = Others()
    sum(range(200_000))
    assert 0.0 <= others.share() <= 1.0


def test_the_checkpoint_is_what_the_shape_says(tmp_path):
    from safetensors.numpy import load_file

    small = replace(
        M8, model=replace(M8.model, hidden_size=64, intermediate_size=96, num_hidden_layers=1, vocab_size=40,
                          num_attention_heads=2, num_key_value_heads=1, head_size=32),
    )  # fmt: skip
    write_checkpoint(small, tmp_path)
    assert read_config(tmp_path)["num_key_value_heads"] == 1
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.layers.0.self_attn.k_proj.weight"].shape == (32, 64)
    assert tensors["lm_head.weight"].dtype == np.float32


def test_the_gguf_file_holds_the_checkpoint_with_rotary_rows_in_the_other_order(tmp_path):
    gguf = pytest.importorskip("gguf")
    from safetensors.numpy import load_file

    from benchmarks.peers.converters.llama_cpp import convert

    small = replace(
        M8, model=replace(M8.model, hidden_size=64, intermediate_size=96, num_hidden_layers=1, vocab_size=40,
                          num_attention_heads=2, num_key_value_heads=1, head_size=32),
    )  # fmt: skip
    write_checkpoint(small, tmp_path)
    convert(tmp_path, tmp_path / "model.gguf", "F32")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    found = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    given = load_file(tmp_path / "model.safetensors")
    query = given["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(found["blk.0.attn_q.weight"][:4], query[[0, 16, 1, 17]])
    np.testing.assert_array_equal(found["output.weight"], given["lm_head.weight"])
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 40
