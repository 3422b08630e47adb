"""The results file keeps every measurement, however the process ends, and refuses results that are not its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvc_trt.accuracy.results import FORMAT, Results
from kvc_trt.errors import InputError, UnsupportedEnvironment
from tests.accuracy.cells import SETTINGS, cell
from tests.mutated_json import mutations, replaced

FIRST, SECOND = cell("full"), cell("hybrid", 64, 8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with two cells."""
    path = tmp_path / "new" / "results.jsonl"
    with Results(path, SETTINGS) as results:
        results.append(FIRST)
        results.append(SECOND)
    return path


def test_appended_cells_are_read_again(path: Path):
    with Results(path, SETTINGS) as results:
        assert results.cells == {FIRST.key: FIRST, SECOND.key: SECOND}
        assert not results.dropped
        results.append(third := cell("rocketkv", 128))
    with Results(path, SETTINGS) as results:
        assert results.cells[third.key] == third


@pytest.mark.parametrize("cut", [1, 40, 300])
def test_a_last_line_that_was_cut_short_is_dropped(path: Path, cut: int):
    path.write_bytes(path.read_bytes()[:-cut])
    with Results(path, SETTINGS) as results:
        assert list(results.cells) == [FIRST.key]
        assert results.dropped
        results.append(SECOND)
    with Results(path, SETTINGS) as results:
        assert list(results.cells) == [FIRST.key, SECOND.key]


def test_a_file_with_a_cut_first_line_is_begun_anew(path: Path):
    path.write_bytes(path.read_bytes()[:20])
    with Results(path, SETTINGS) as results:
        assert results.dropped
        assert not results.cells
    assert json.loads(path.read_text())["model"] == SETTINGS["model"]


def test_results_of_other_settings_are_refused_and_kept(path: Path):
    before = path.read_bytes()
    with pytest.raises(InputError, match="seed is 0 there, 1 here") as caught, Results(path, {**SETTINGS, "seed": 1}):
        pass
    assert "--output-dir" in caught.value.hint
    assert path.read_bytes() == before


def test_a_file_without_a_cell_holds_nothing_of_other_settings(tmp_path: Path):
    path = tmp_path / "results.jsonl"
    with Results(path, SETTINGS):
        pass  # refused before anything was asked
    with Results(path, {**SETTINGS, "seed": 1}) as results:
        results.append(FIRST)
    assert json.loads(path.read_text().splitlines()[0])["seed"] == 1


@pytest.mark.parametrize("content", ["a diary", "a diary\n", '{"some": "json"}\n', "[1]\n"])
def test_a_file_of_something_else_is_refused_and_kept(tmp_path: Path, content: str):
    path = tmp_path / "diary"
    path.write_text(content)
    with pytest.raises(InputError, match="is not a file of accuracy results"), Results(path, SETTINGS):
        pass
    assert path.read_text() == content


@pytest.mark.parametrize("line", ["{}", "nonsense", '{"task": "t"}', "[1, 2]"])
def test_an_invalid_line_in_the_middle_is_refused_by_number(path: Path, line: str):
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, *lines[2:]]) + "\n")
    with pytest.raises(InputError, match="line 2: expected a cell of results"), Results(path, SETTINGS):
        pass


@pytest.mark.parametrize("scored_by", ["answer", "likelihood"])
def test_a_cell_with_any_value_replaced_is_refused_or_has_figures(tmp_path: Path, scored_by: str):
    honest = cell("hybrid", 64, 1)
    if scored_by == "likelihood":
        honest = replace(honest, scored_by="likelihood", full_scores=())
    honest = replace(honest, **{name: getattr(honest, name)[:3] for name in ("scores", "full_scores", "depths")})
    stored, refused = json.loads(json.dumps(honest.to_json())), []
    for path, value in list(mutations(stored))[::5]:
        line = json.dumps(replaced(stored, path, value))
        file = tmp_path / "results.jsonl"
        file.write_text(f"{json.dumps({'format': FORMAT, **SETTINGS})}\n{line}\n")
        try:
            with Results(file, SETTINGS) as results:
                (found,) = results.cells.values()
        except InputError as error:
            refused.append(error.message)
            continue
        assert (found.figure if found.scores else found.reason) is not None
        assert len(found.depths) in (0, 3) or not found.scores
        assert [found.lost, found.on_answered, found.to_json()]
    assert all("line 2: expected a cell of results" in message and len(message) < 500 for message in refused)
    assert len(refused) > 50


def test_scores_outside_0_to_1_are_refused(path: Path):
    path.write_text(path.read_text().replace("[1.0, ", "[7.0, ", 1))
    with pytest.raises(InputError, match=r"outside 0\.\.1"), Results(path, SETTINGS):
        pass


def test_a_directory_that_cannot_be_made_is_the_users_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write the results file"), Results(tmp_path / "file" / "r", SETTINGS):
        pass


def test_a_second_writer_of_one_result_file_is_refused(path: Path):
    with (
        Results(path, SETTINGS),
        pytest.raises(UnsupportedEnvironment, match="another process is writing"),
        Results(path, SETTINGS),
    ):
        pass
