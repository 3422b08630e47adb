"""The programs that tests share: written once, distinguished by all their inputs, and watched."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from kvc_trt.graph.state import cache_sites
from tests.every_policy import CASES, OTHER_FORMS, parameters_of
from tests.small_model import SMALL
from tests.small_programs import SmallPrograms, copied

NEEDED = {"turns": True, "draft_tokens": 2}


def files_of(folder: Path) -> dict[Path, int]:
    """Return the files of a folder, with the time when each was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock" and path.is_file()}


def asked(folder: Path) -> list[Path]:
    """Return the files that a process writes when it asks for a program."""
    programs = SmallPrograms(folder)
    programs("rocketkv", **NEEDED)
    return list(programs._digests)


def test_of_two_processes_one_writes_each_file(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        written = [path for paths in pool.map(asked, [tmp_path] * 2, chunksize=1) for path in paths]
    assert sorted(written) == sorted(files_of(tmp_path))
    assert len(written) == 5  # weights, prefill, decode, extend, draft


def test_later_callers_get_the_same_files(tmp_path):
    first = SmallPrograms(tmp_path)("h2o")
    before = files_of(tmp_path)
    second = SmallPrograms(tmp_path)("h2o")
    assert (second.weight_file.path, second.prefill.path) == (first.weight_file.path, first.prefill.path)
    assert files_of(tmp_path) == before


def test_weights_are_shared_and_graphs_are_of_their_settings(tmp_path):
    programs = SmallPrograms(tmp_path)
    made = [programs("rocketkv"), programs("rocketkv", top_k=8), programs("rocketkv", **NEEDED), programs("full")]
    assert len({program.weight_file.path for program in made}) == 1
    assert len({program.prefill.path for program in made}) == 4
    assert len({program.decode.path for program in made}) == 3
    assert programs("full", "fp16").weight_file.path != made[0].weight_file.path
    assert programs("full", max_output_len=17).weight_file.path != made[0].weight_file.path


def test_without_graphs_there_are_weights_alone(tmp_path):
    program = SmallPrograms(tmp_path)("rocketkv", graphs=False, turns=True)
    assert list(files_of(tmp_path)) == [program.weight_file.path]
    assert program.extend is not None


def test_settings_that_a_policy_does_not_take_are_left_out(tmp_path):
    program = SmallPrograms(tmp_path)("streaming-llm, positions of the cache", **NEEDED)
    assert (program.extend, program.draft, program.draft_tokens) == (None, None, 0)


def test_a_changed_file_is_noticed_and_a_copy_may_change(tmp_path):
    programs = SmallPrograms(tmp_path / "shared")
    program, own = programs("full"), tmp_path / "own"
    own.mkdir()
    copied(program, own).weight_file.path.write_bytes(b"damaged")
    assert programs.changed() == []
    program.decode.path.write_bytes(b"damaged")
    assert programs.changed() == [program.decode.path]


@pytest.mark.parametrize("name", [*CASES, *OTHER_FORMS])
def test_every_policy_does_something_on_a_prompt_of_200_tokens(name):
    rules = [site.parameters for site in cache_sites(SMALL, parameters_of(name))]
    assert any(rule.prompt_budget < 200 or rule.reads_a_part for rule in rules) == (name != "full")


def test_an_unknown_form_of_a_policy_is_refused():
    with pytest.raises(KeyError, match="no such form"):
        parameters_of("rocketkv, no such form")
