"""The report: evidence, bars, order, and files that need nothing else."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvc_trt import policies
from kvc_trt.accuracy.cell import Cell
from kvc_trt.accuracy.grid import Variant
from kvc_trt.accuracy.pages.figures import average_curves
from kvc_trt.accuracy.pages.heat_map import by_depth, depth_bins
from kvc_trt.accuracy.pages.html_page import html_page
from kvc_trt.accuracy.pages.published import compare, method_of, paper_order, published_tables, summary
from kvc_trt.accuracy.pages.report import Bars
from kvc_trt.accuracy.run import figures, write_files
from tests.accuracy.cells import SAMPLES, SETTINGS, cell, grid, report

DOCUMENTED = (Path(__file__).parents[2] / "docs/accuracy.md").read_text(encoding="utf-8")
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every file that one measurement writes, by file name."""
    paths = write_files(report(bars=Bars(0.7)), tmp_path_factory.mktemp("accuracy"))
    return {path.name: path for path in paths}


def test_a_cell_is_stored_with_its_figures_and_read_again():
    one = cell("hybrid", 64, 5)
    stored = one.to_json()
    assert (stored["samples"], stored["accuracy"], stored["query_aware"], stored["evidence"]) == (20, 0.25, True, True)
    assert stored["standard_error"] == pytest.approx((0.25 * 0.75 / (SAMPLES - 1)) ** 0.5)
    assert Cell.from_json(stored) == one


def test_a_cell_of_likelihoods_has_no_accuracy():
    one = replace(cell("hybrid", 64), scored_by="likelihood", scores=(1.5, 2.5), full_scores=(), depths=(0.0, 1.0))
    stored = one.to_json()
    assert (stored["accuracy"], stored["negative_log_likelihood"], stored["evidence"]) == (None, 2.0, False)
    assert one.figure == "2.000 ± 0.500 nats"
    assert Cell.from_json(stored) == one


def test_the_average_is_over_tasks_that_count():
    found = report()
    average, tasks = found.average("query-aware", 512, Variant("hybrid", 64))
    assert (average.value, tasks) == (0.4, 1)  # lines are not learned
    assert found.average("query-aware", 512, Variant("snapkv", 64)) is None
    assert [(group.task, mean.value) for group, mean in found.not_learned] == [("lines", 0.5)] * 4


def test_a_loss_without_bars_does_not_fail():
    assert report().passed
    assert not report(cells=[cell("snapkv", 64, reason="too small")]).passed


@pytest.mark.parametrize(
    ("bars", "failing"),
    [(Bars(minimum_accuracy=0.4), 0), (Bars(minimum_accuracy=0.7), 4), (Bars(maximum_loss=0.3), 4),
     (Bars(maximum_loss=0.2), 8), (Bars(0.99, 0.0), 16)],
)  # fmt: skip
def test_bars_judge_cells_that_count(bars: Bars, failing: int):
    found = report(bars=bars)
    assert len(found.failures) == failing
    assert found.passed == (failing == 0)
    assert found.to_json()["thresholds"]["minimum_accuracy"] == bars.minimum_accuracy


def test_a_policy_is_not_blamed_for_what_the_full_cache_misses():
    """Of 20 questions the full cache answers the first 16; the policy answers the last 16."""
    one = cell("hybrid", 64, full=0.8)
    one = replace(one, scores=(0.0,) * 4 + (1.0,) * 16)
    assert one.evidence
    assert (one.on_answered.value, one.on_answered.samples, one.lost.value) == (0.75, 16, 0.0)
    assert Bars(minimum_accuracy=0.75, maximum_loss=0.0).failures([one]) == []
    (failure,) = Bars(minimum_accuracy=0.76).failures([one])
    assert failure.endswith("75.0 ± 11.2 % of the 16 questions that the full cache answers, expected at least 76 %")
    lower = replace(one, scores=(0.0,) * 5 + (1.0,) * 15)
    (failure,) = Bars(maximum_loss=0.04).failures([lower])
    assert failure.endswith("5.0 ± 15.3 points lost, expected at most 4")


@pytest.mark.parametrize(
    ("full", "asked", "counts"), [(0.8, 20, True), (0.75, 20, False), (1.0, 3, True), (0.6, 3, False)]
)
def test_a_cell_counts_from_enough_answered_questions_on(full: float, asked: int, counts: bool):
    one = replace(cell(full=full), full_scores=tuple(float(i < full * asked) for i in range(asked)))
    assert one.evidence == counts


def test_bars_without_evidence_fail():
    cells = [one for one in grid() if one.task == "lines"]
    assert "no cell counts" in report(cells=cells, bars=Bars(0.1)).failures[0]


def test_the_order_is_judged_question_by_question():
    cells = grid()
    won = compare(cells, "rocketkv", "hybrid", "query-aware", 64)
    assert (won.difference.value, won.verdict, len(won.groups)) == (0.6, "holds", 2)
    assert compare(cells, "rocketkv", "hybrid", "query-aware", 128).verdict == "equal within the error"
    assert compare(cells, "hybrid", "rocketkv", "query-aware", 64).verdict == "does not hold"
    assert compare(cells, "rocketkv", "snapkv", "query-aware", 64) is None
    comparisons = paper_order(cells)
    claims = {(one.first, one.second) for one in comparisons}
    first = "query-aware: of 3 comparisons (claim and budget) 2 holds, 1 equal within the error, 0 does not hold"
    assert summary(comparisons)[0] == first
    assert claims == {("rocketkv", "hybrid"), ("rocketkv", "snapkv")}


def test_the_documented_methods_are_all_judged_in_the_papers_order():
    """Every policy that docs/accuracy.md asks for the tables takes part in a claim, with its settings."""
    asked = re.search(r"^ +METHODS=(\S+)$", DOCUMENTED, re.MULTILINE)[1].split(",")
    rank = {"exact-topk": 20, "rocketkv-v1": 12}
    cells = [cell("full"), *(cell(policy, 256, rank.get(policy, 4)) for policy in asked)]
    judged = paper_order(cells)
    assert {one.verdict for one in judged} == {"holds"}
    named = {name for one in judged for name in (one.first, one.second)}
    assert named == {policy.partition(":")[0] for policy in asked}
    assert ("rocketkv-v1", "duo-attention") in {(one.first, one.second) for one in judged}


@pytest.mark.parametrize(("asked", "bins", "fullest", "emptiest"), [(50, 10, 5, 5), (30, 6, 6, 3)])
def test_ten_depths_fill_ten_bins_evenly_from_fifty_questions_on(asked: int, bins: int, fullest: int, emptiest: int):
    """A map makes six bins of the paper's thirty depths, of one depth or two."""
    depths = tuple((index % 10) / 9 for index in range(asked))
    one = replace(cell("hybrid", 64), scores=(1.0,) * asked, full_scores=(1.0,) * asked, depths=depths)
    assert depth_bins([one]) == bins
    filled = [sum(min(int(depth * bins), bins - 1) == index for depth in depths) for index in range(bins)]
    assert (max(filled), min(filled)) == (fullest, emptiest)
    assert by_depth(one, bins).tolist() == [1.0] * bins


def test_a_head_pattern_file_is_no_part_of_a_methods_name():
    assert method_of("duo-attention:head_pattern=a.tsv") == "duo-attention"
    assert method_of("duo-attention:sinks=4:head_pattern=a.tsv") == "duo-attention:sinks=4"
    assert method_of("hybrid:page_size=16") == "hybrid:page_size=16"


@pytest.mark.slow
def test_the_html_page_is_one_file_and_every_cell_says_what_it_is(files: dict[str, Path]):
    page = files["report.html"].read_text()
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "http" not in page
    assert "m&lt;o&gt;del" in page
    assert "m<o>del" not in page
    assert "&lt;13&gt; tokens" in page
    cells = re.findall(r"<small>n (\d+), (aware|agnostic)</small>", page)
    assert {count for count, _ in cells} == {"20"}
    assert {mode for _, mode in cells} == {"aware", "agnostic"}
    assert page.count("data:image/png;base64,") == len(files) - 2
    assert "failed" in page


def test_figures_are_png_and_equal_for_equal_results(files: dict[str, Path]):
    images = {name: path.read_bytes() for name, path in files.items() if name.endswith(".png")}
    assert all(image.startswith(PNG) for image in images.values())
    assert images.keys() == {
        f"{kind}-{mode}.png" for kind in ("memory", "budget", "tasks", "depth-niah-single-1", "depth-lines")
        for mode in ("query-aware", "query-agnostic")
    }  # fmt: skip
    name = "budget-query-aware.png"
    assert average_curves(report(), "query-aware") == images[name]


def test_a_report_of_the_full_cache_alone_has_no_figures():
    assert figures(report(cells=[cell("full")])) == {}


def test_csv_has_a_line_per_cell_and_nothing_where_nothing_applies(files: dict[str, Path]):
    rows = list(csv.DictReader(io.StringIO(files["accuracy.csv"].read_text())))
    assert len(rows) == len(grid())
    absent = next(row for row in rows if row["reason"])
    assert (absent["accuracy"], absent["low"], absent["samples"]) == ("", "", "0")
    assert (rows[0]["high"], rows[0]["query_aware"]) == ("1.0", "True")


def test_published_numbers_are_shown_for_the_published_model_only():
    page = html_page(report(settings={**SETTINGS, "model": "llama3.1-8b"}), {}).decode()
    assert "Published for this model" in page
    assert "86.4" in page
    assert "Published" not in html_page(report(), {}).decode()


def test_published_tables_have_every_method_and_column():
    tables = published_tables()
    assert len(tables.columns) == 18
    for table in tables.columns:
        assert {
            "full",
            "exact-topk",
            "rocketkv-v1",
            "hybrid",
            "sparq",
            "quest-matched",
            "snapkv",
            "duo-attention",
        } == set(table.by_policy)
        assert all(0 <= score <= 100 for scores in table.by_policy.values() for score in scores.values())
    llama = tables.of("llama3.1-8b")[2]
    assert (llama.length, llama.by_policy["rocketkv-v1"][256], llama.by_policy["full"]) == (16000, 86.4, {None: 91.3})
    assert tables.budgets[0] == 256
    assert len(tables.claims) == len(set(tables.claims)) == 18
    assert {name for claim in tables.claims for name in claim} <= {one.name for one in policies.describe()}


HOSTILE = "\"'><script>alert(1)</script>&amp;{{ 7 * 7 }}"


def test_no_text_of_a_measurement_becomes_markup():
    """Names of tasks, policies, settings, files and reasons come from users and from models' files."""
    cells = [
        cell("full", task=HOSTILE),
        cell(f"hybrid:{HOSTILE}", 64, 3, task=HOSTILE),
        cell("snapkv", 64, reason=HOSTILE, task=HOSTILE),
        cell("full", right=3, full=0.1, task="lines", mode=HOSTILE),
    ]
    settings = {**SETTINGS, "model": HOSTILE, HOSTILE: {HOSTILE: HOSTILE}}
    page = html_page(report(settings=settings, cells=cells, bars=Bars(0.5)), {f"{HOSTILE}.png": PNG}).decode()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "{{ 7 * 7 }}" in page
    parser = Markup()
    parser.feed(page)
    assert parser.tags <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "table", "tr", "th", "td", "p", "b", "span",
        "ul", "li", "details", "summary", "img", "small", "div",
    }  # fmt: skip
    assert parser.attributes <= {"lang", "charset", "name", "content", "class", "open", "alt", "src"}


class Markup(HTMLParser):
    """The tags and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
