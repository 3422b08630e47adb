"""`make fuzz` finds exceptions, crashes, hangs, memory, messages, differences, and makes it small."""

from __future__ import annotations

import json
from random import Random

import pytest

from tests.fuzz.broken_readers import (
    BAD,
    Broken,
    Crashing,
    Deaf,
    Different,
    Greedy,
    Spinning,
    Strict,
    Verbose,
)
from tests.fuzz.campaign import Plan, run, write_regressions
from tests.fuzz.inputs import Inputs
from tests.fuzz.kind import kinds
from tests.fuzz.minimise import smaller
from tests.fuzz.mutation.raw import RAW
from tests.fuzz.mutation.trees import JSON, of_trees
from tests.fuzz.verdict import judge


def campaign(kind, folder, inputs=40):
    (result,) = run([kind], Plan(60, seed=1, folder=folder, most=inputs, minimising=5.0))
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (Broken, "KeyError broken_readers.py:"),
        (Crashing, "crash by SIGSEGV"),
        (Spinning, "takes too long"),
        (Deaf, "takes too long"),
        (Greedy, "takes too much memory"),
        (Verbose, "message not printable"),
        (Different, "differs: names"),
    ],
)
def test_a_defect_is_found_made_small_and_does_not_end_the_run(kind, key, tmp_path):
    result = campaign(kind, tmp_path / "campaign")
    assert result.inputs == 40
    assert result.bad >= 1
    assert result.accepted + result.refused + result.bad == result.inputs
    (finding,) = result.findings
    assert finding["key"].startswith(key)
    smallest = bytes.fromhex(finding["content"])
    assert BAD in smallest
    assert len(smallest) <= len(b"valid" + BAD), "as small as its time allows"
    (file,) = write_regressions(result.findings, tmp_path / "regressions")
    assert file.parent.name == kind.name
    assert file.read_bytes() == smallest


def test_a_valid_input_must_be_accepted(tmp_path):
    assert [finding["key"] for finding in campaign(Strict, tmp_path).findings] == ["valid input 0 is refused"]


def test_inputs_that_only_ours_accepts_are_counted_by_reason(tmp_path):
    result = campaign(Different, tmp_path, inputs=3)
    assert (result.compared, result.only_ours) == (3, {"a question": 1})


def test_an_input_follows_from_seed_and_number(tmp_path):
    first, again, other = (Inputs(Broken(tmp_path), seed) for seed in (1, 1, 2))
    assert [first[number] for number in range(50)] == [again[number] for number in range(50)]
    assert [first[number] for number in range(2, 50)] != [other[number] for number in range(2, 50)]


def test_smaller_keeps_what_is_needed_together():
    assert smaller(b"xxAxxxxxxxBxxx", lambda tried: b"A" in tried and b"B" in tried) == b"AB"
    assert smaller(b"AB" * 50, lambda tried: True, seconds=0.0) == b"AB" * 50


def test_every_mutator_is_deterministic_and_changes_inputs():
    seeds = [json.dumps({"a": [1, 2.5, "three"], "b": {"c": None, "d": True}}).encode(), b"[1, [2, [3]]]"]
    for mutator in (*RAW, of_trees(JSON)):
        made = [mutator(Random(number), seeds[0], seeds) for number in range(30)]
        assert made == [mutator(Random(number), seeds[0], seeds) for number in range(30)]
        assert len(set(made)) > 5, mutator.__name__


def test_an_empty_input_can_be_mutated():
    for mutator in (*RAW, of_trees(JSON)):
        for number in range(20):
            mutator(Random(number), b"", [b""])


def test_every_kind_is_found_by_its_file():
    assert {"safetensors", "gguf", "hf-config", "tokenizer", "build-yaml", "engine-manifest", "proof"} <= kinds().keys()


def test_the_alarm_is_off_afterwards(tmp_path):
    assert judge(Spinning(tmp_path), BAD).key == "takes too long"
    assert judge(Spinning(tmp_path), b"valid").kind == "accepted"
