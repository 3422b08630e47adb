"""docs/choosing.md follows from the answers: nothing smaller would do, and the page is that of its results."""

from __future__ import annotations

import pytest

from benchmarks.accuracy.smollm2 import choices, choosing, grid
from benchmarks.accuracy.smollm2.cells import OURS, Comparison
from benchmarks.accuracy.smollm2.page import recorded
from benchmarks.accuracy.smollm2.stages import LONGEST_ANSWERS
from kvc_trt.models.presets import load_preset


@pytest.fixture(scope="module")
def found() -> Comparison:
    return recorded()


def test_the_page_is_that_of_its_results(found: Comparison) -> None:
    assert choosing.MARKS.inside(choosing.PAGE) == choosing.measured(found, choosing.timed())


@pytest.mark.parametrize("use", choices.USES)
def test_the_chosen_cache_is_the_smallest_that_is_good_enough(found: Comparison, use: str) -> None:
    groups = choices.USES[use]
    taken = choices.choice(found, groups)
    limit = min(full.stored for group in groups if (full := found.full(group)))
    if taken is not None:
        cells = [found.cell(OURS, group, taken.policy, f"budget {taken.token_budget}") for group in groups]
        assert all(cell is not None and choices.good_enough(found, cell) for cell in cells)
        limit = max(cell.stored for cell in cells if cell)
    for other in found.of(OURS, groups[0]):
        cells = [found.cell(OURS, group, other.method, other.point) for group in groups]
        if all(cell is not None and cell.stored < limit for cell in cells):
            assert not all(choices.good_enough(found, cell) for cell in cells if cell)


def test_every_figure_has_the_same_number_of_questions(found: Comparison) -> None:
    cells = [cell for groups in choices.USES.values() for group in groups for cell in found.of(OURS, group)]
    assert {len(cell.scores) for cell in cells} == {choices.SAMPLES}


def test_bytes_by_plan_are_those_of_the_engines_that_answered(found: Comparison) -> None:
    """Today's engines keep the place of every slot as well, for turns: 4 bytes beside 512 of a slot's key and value."""
    for policy in choices.BESIDE:
        for group in (choices.ONE, choices.LONG):
            cell = found.cell(OURS, group, policy, "budget 256")
            assert cell is not None
            row = choices.Row.of(choices.Variant(policy, 256), group)
            assert row.mebibytes * choices.MIB == pytest.approx(cell.stored, rel=0.02)


def test_the_preset_recommends_what_the_answers_choose(found: Comparison) -> None:
    """A budget pays for the answer too, so a prompt kept as many tokens less."""
    taken = choices.choice(found, choices.USES["any of these: through the template, plain, among, long"])
    assert taken is not None
    assert taken.token_budget is not None
    recommended = load_preset(grid.MODEL).recommended
    assert recommended is not None
    assert (recommended.policy, {"pool_kernel": recommended.pool_kernel}) == (taken.name, taken.settings)
    kept = taken.token_budget - LONGEST_ANSWERS[choices.ONE.task]
    assert kept <= recommended.prompt_budget <= taken.token_budget
