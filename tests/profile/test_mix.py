"""Requests per second by the model: against a simulation of its callers, and the limits where it is known by hand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvc_trt import plan
from kvc_trt.errors import InputError
from kvc_trt.models.presets import load_preset
from kvc_trt.policies import resolve
from kvc_trt.profile.accelerators import H100, Accelerator
from kvc_trt.profile.planning.mix import Mix, MixedRequest, plan_mix, read_mix
from kvc_trt.profile.planning.placement import Placement, on_one_gpu

MODEL = load_preset("llama3.1-8b").config
MIXED = (MixedRequest(input=30000, output=64, weight=1.0), MixedRequest(input=2000, output=512, weight=3.0))


def placement(policy: str = "rocketkv", longest: int = 32640) -> Placement:
    parameters = resolve(policy, model=MODEL, token_budget=512, max_input_len=longest, max_output_len=512)
    return on_one_gpu(MODEL, parameters, "bf16", turns=True)


def of(found: Placement, requests: tuple[MixedRequest, ...], callers: int, gpu: Accelerator = H100) -> dict:
    [entry] = plan_mix(found, Mix(Path("mix.yaml"), callers, requests), [gpu])["gpus"]
    return entry


def simulated(found: Placement, side: str, rows: int, requests: int = 2500) -> float:
    """Requests per second of `rows` callers: every row that ends is followed by a prefill, then all rows step."""
    draw = random.Random(0)
    weights = [one.weight for one in MIXED]
    running: list[list[float]] = []
    clock, done = 0.0, 0
    while done < requests:
        while len(running) < rows:
            [one] = draw.choices(MIXED, weights)
            clock += found.prefill_seconds(H100, one.input)
            running.append([one.output - 1, found.bytes_read(side, one.input, one.output // 2)])
        steps = min(left for left, _ in running)
        mean = sum(read for _, read in running) / rows
        clock += steps * found.step_seconds(side, H100, rows, mean)
        for one in running:
            one[0] -= steps
        done += sum(left == 0 for left, _ in running)
        running = [one for one in running if one[0] > 0]
    return done / clock


@pytest.mark.slow
@pytest.mark.parametrize(("side", "callers"), [("compressed", 1), ("compressed", 16), ("full", 8), ("full", 64)])
def test_the_prediction_is_what_a_simulation_of_the_callers_reaches(side, callers):
    found = placement()
    entry = of(found, MIXED, callers)[side]
    assert entry["rows"] == min(callers, found.rows_that_fit(side, H100))
    assert entry["requests_per_second"] == pytest.approx(simulated(found, side, entry["rows"]), rel=0.05)


def test_one_caller_waits_for_its_prefill_and_its_steps():
    found = placement()
    entry = of(found, (MixedRequest(input=8000, output=101),), 1)["compressed"]
    step = found.step_seconds("compressed", H100, 1, found.bytes_read("compressed", 8000, 50))
    assert 1 / entry["requests_per_second"] == pytest.approx(found.prefill_seconds(H100, 8000) + 100 * step)
    assert entry["mean_seconds_per_request"] == pytest.approx(1 / entry["requests_per_second"])
    assert entry["tokens_per_second"] == pytest.approx(101 * entry["requests_per_second"])


def test_answers_of_one_token_are_prefills_alone():
    entry = of(placement(), (MixedRequest(input=8000, output=1),), 4)["compressed"]
    assert entry["share_of_time_in_prefill"] == 1
    assert entry["requests_per_second"] == pytest.approx(1 / entry["first_token_seconds"])


def test_weights_are_relative_and_more_callers_than_rows_change_nothing_but_the_wait():
    found = placement()
    scaled = tuple(one.model_copy(update={"weight": 7 * one.weight}) for one in MIXED)
    assert of(found, scaled, 8)["full"] == pytest.approx(of(found, MIXED, 8)["full"])
    [few, many] = [of(found, MIXED, callers)["full"] for callers in (64, 128)]
    assert few["requests_per_second"] == many["requests_per_second"]
    assert many["mean_seconds_per_request"] == 2 * few["mean_seconds_per_request"]


def test_a_side_of_which_no_row_fits_has_no_rate():
    small = Accelerator("small", 1e12, 24e9, 100e12)
    entry = of(placement(longest=130000), MIXED, 4, small)
    assert entry["full"] is None
    assert entry["compressed"]["rows"] == 4


FILE = "concurrency: 4\nrequests:\n  - {input: 3000, output: 200, weight: 2}\n  - {input: 8000, output: 100}\n"


def test_lengths_of_the_engine_are_the_longest_of_the_mix(tmp_path):
    path = tmp_path / "mix.yaml"
    path.write_text(FILE)
    found = plan("llama3.1-8b", token_budget=512, mix=path, gpus=["a100"])
    assert (found["policy"]["max_input_len"], found["policy"]["max_output_len"]) == (8000, 200)
    sources = {choice["name"]: choice["source"] for choice in found["choices"]}
    assert sources["max_input_len"] == "the longest of the mix"
    assert found["mix"]["mean_input_tokens"] == pytest.approx((2 * 3000 + 8000) / 3)
    assert [entry["accelerator"] for entry in found["mix"]["gpus"]] == ["A100"]
    with pytest.raises(InputError, match=r"requests\[1\]: input is 8000; this engine takes at most 4096 tokens"):
        plan("llama3.1-8b", token_budget=512, mix=path, max_input_len=4096)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "mapping"),
        ("concurrency: 4\nrequests: []\n", "requests"),
        ("concurrency: 0\nrequests: [{input: 1, output: 1}]\n", "concurrency"),
        ("concurrency: 4\nrequests: [{input: 0, output: 1}]\n", "input"),
        ("concurrency: 4\nrequests: [{input: 1, output: 1, weight: -1.0}]\n", r"requests\[0\]: weight"),
        (
            "concurrency: 4\nrequests: [{input: 1, output: 1, wieght: 2.0}]\n",
            r"requests\[0\]: unknown key 'wieght'; did you mean 'weight'",
        ),
        ("concurrency: 4\nrequests: [{input: '1', output: 1}]\n", r"requests\[0\]: input"),
        ("concurrency: 4\n", "requests"),
        ("concurrency: [\n", "mix.yaml"),
    ],
)
def test_an_invalid_mix_file_is_refused_in_one_line(content, message, tmp_path):
    path = tmp_path / "mix.yaml"
    path.write_text(content)
    with pytest.raises(InputError, match=message) as error:
        read_mix(path)
    assert "\n" not in error.value.message


def test_a_missing_mix_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"mix\.yaml"):
        read_mix(tmp_path / "mix.yaml")
