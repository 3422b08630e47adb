"""The profile's HTML page shows the figures of its JSON, needs nothing else, and bears missing figures."""

from __future__ import annotations

import copy
import re
from html.parser import HTMLParser

import pytest

from kvc_trt.backends.benchmark import CopyBandwidth
from kvc_trt.backends.onnxruntime import benchmark
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.profile import run as profile_run
from kvc_trt.profile.pages.report_page import html_bytes
from kvc_trt.profile.request import ProfileRequest
from kvc_trt.progress import NullProgress
from kvc_trt.sizes import readable_size

REQUEST = ProfileRequest(
    contexts=(96, 512),
    batches=(1, 2),
    steps=5,
    decode_seconds=5.0,
    prefills=1,
    prefill_seconds=60.0,
    options=RunOptions(threads=1),
)


@pytest.fixture(scope="module")
def result(engine):
    with pytest.MonkeyPatch.context() as patch:
        found = CopyBandwidth(10e9, 1e8, 3, 1 << 30, 1, 1 << 20)
        patch.setattr(benchmark, "measure_copy_bandwidth", lambda threads: found)
        return profile_run.profile_engine(engine, REQUEST, NullProgress())


@pytest.fixture(scope="module")
def page(result):
    return html_bytes(result).decode()


class _Tables(HTMLParser):
    """The cells of every table, row by row."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self._in_cell = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag):
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data):
        if self._in_cell:
            self.tables[-1][-1][-1] += data


def test_every_table_shows_the_figures_of_the_result(result, page):
    roofline, memory, decode_memory, first_token, steps = _Tables(page).tables
    for shown, row in zip(decode_memory[1:], result["memory"]["decode"], strict=True):
        assert shown[5] == readable_size(row["peak_bytes"])
        assert shown[4] == f"{100 * row['state_modelled_share_of_dense']:.0f} %"
    for shown, row in zip(roofline[1:], result["rows"], strict=True):
        reads = readable_size(row["bytes_read_per_step_modelled"])
        figures = [f"{row['floor_ms']:.2f}", f"{row['median_itl_ms']:.2f}", f"{row['percent_of_floor']:.0f} %"]
        assert shown == [str(row["context"]), str(row["batch_size"]), row["side"], reads, *figures]
    for shown, row in zip(steps[1:], result["rows"], strict=True):
        assert shown[3:7] == [
            *(f"{row[f'{kind}_itl_ms']:.3f}" for kind in ("p50", "p90", "p99")),
            f"{row['system_output_throughput_tok_s']:,.1f}",
        ]
        assert shown[7] == f"{row['speedup_over_dense']:.2f}x"
    for shown, row in zip(first_token[1:], result["rows"], strict=True):
        assert shown[3] == f"{row['median_ttft_ms'] / 1e3:.3f}"
    top = [line for line in result["memory"]["rows"] if (line["context"], line["batch_size"]) == (512, 2)]
    expected = {(line["side"], line["kind"], readable_size(line["measured_bytes"])) for line in top}
    assert {tuple(shown[:3]) for shown in memory[1:]} == expected


def test_every_point_of_the_charts_names_its_figures(result, page):
    titles = re.findall("<title>(.*?)</title>", page)[1:]
    for row in result["rows"]:
        where = f"{row['context']:,} tokens, batch {row['batch_size']}"
        assert f"{row['side']}, {where}: {row['median_itl_ms']:.3f} ms, p90 {row['p90_itl_ms']:.3f}" in titles
        assert any(title.startswith(f"{row['side']}, {where}:") and "of the roof" in title for title in titles)


def test_the_operators_of_a_step_add_up_to_it(result, page):
    for side in ("engine", "dense"):
        rows = [row for row in result["operators"] if row["side"] == side]
        assert {(row["context"], row["batch_size"]) for row in rows} == {(512, 1)}
        assert sum(row["share"] for row in rows) == pytest.approx(1)
        assert rows == sorted(rows, key=lambda row: -row["recorded_ms"])
        step = next(
            row["median_itl_ms"]
            for row in result["rows"]
            if (row["side"], row["context"], row["batch_size"]) == (side, 512, 1)
        )
        slowest = rows[0]
        assert f"{slowest['share'] * step:.2f} ms, {100 * slowest['share']:.1f} %" in page
    names = {row["operator"]: row["nodes"] for row in result["operators"] if row["side"] == "engine"}
    assert {"KvcHybridAttention", "between operators"} <= set(names)
    assert {"KvcDenseAttention"} <= {row["operator"] for row in result["operators"] if row["side"] == "dense"}


def test_the_page_needs_nothing_else_and_reads_on_a_narrow_screen(page):
    assert not re.findall(r"(?:src|href)=|url\(|@import|<script", page)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert page.count("<svg") == 3
    assert page.count('class="wide"') == page.count("<table>")


def test_findings_are_shown_and_every_value_is_escaped(result):
    changed = {**result, "findings": ["a < b & c"], "engine": {**result["engine"], "model": "<b>model"}}
    page = html_bytes(changed).decode()
    assert "<li>a &lt; b &amp; c</li>" in page
    assert "<b>model" not in page
    assert "&lt;b&gt;model" in page


def test_unmeasured_figures_are_left_out(result):
    bare = copy.deepcopy(result)
    bare["operators"] = []
    bare["memory"]["rows"] = []
    bare["rows"] = [row for row in bare["rows"] if row["side"] == "engine"]
    for row in bare["rows"]:
        row["speedup_over_dense"] = row["ceiling_speedup"] = row["median_ttft_ms"] = None
    page = html_bytes(bare).decode()
    assert "Where a step" not in page
    assert "Memory by kind" not in page
    assert "First token" not in page
    assert "None" not in page
    nothing = html_bytes({**bare, "rows": []}).decode()
    assert "<svg" not in nothing


def test_operators_of_a_side_that_was_not_timed_are_left_out(result):
    changed = copy.deepcopy(result)
    changed["rows"] = [row for row in changed["rows"] if row["side"] != "dense" or row["context"] != 512]
    assert any(row["side"] == "dense" for row in changed["operators"])
    assert html_bytes(changed) != html_bytes(result)
