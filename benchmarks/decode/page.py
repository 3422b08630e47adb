"""docs/results/decode.md and its picture, from the results of two benchmarks alone.

python -m benchmarks.decode.page            # after benchmarks.decode.onnxruntime_steps and benchmarks.prefill.memory
"""

from __future__ import annotations

from typing import Any

from benchmarks import store
from benchmarks.machine import ROOT
from benchmarks.page import paragraph
from benchmarks.serving import plots

PAGE = ROOT / "docs" / "results" / "decode.md"
PICTURE = ROOT / "docs" / "images" / "decode-cpu.svg"
RATIO_BARS = {16384: 1.9, 32768: 3.5, 131072: 9.0}
"""The least ratio of the dense step's time to the sparse step's, by context."""
ATTENTION_BARS = {1: 20.0, 2: 12.0}
"""The least ratio of the same times for one layer's attention alone, by threads."""
GROWTH_BAR = 0.1
"""The most by which the sparse step may grow from the shortest to the longest context."""
SIDES = {"full": "dense", "rocketkv": "rocketkv"}
Row = dict[str, Any]


def read(name: str) -> Row:
    """Return a committed result."""
    return store.read(store.RESULTS / f"{name}.json")


def picture(result: Row) -> str:
    """Return the plot of a step over the context, for both sides and every batch."""
    rows = result["whole_step"]
    series = {
        f"{name}, batch {batch}": [
            (row["context"] / 1024, row[f"{side}_native"]["median_ms"]) for row in rows if row["batch"] == batch
        ]
        for batch in sorted({row["batch"] for row in rows}, reverse=True)
        for side, name in SIDES.items()
    }
    label = "Time of a decode step over the length of the context: dense attention grows with it, RocketKV does not"
    return plots.lines(series, "context, K tokens (1K = 1,024)", "one decode step, ms", label)


def page(result: Row, prefill: Row) -> str:
    """Return the whole page."""
    return (
        "\n\n".join(
            [
                "# Results: decode steps on a CPU",
                "<!-- written by `python -m benchmarks.decode.page`; change that, not this page -->",
                _head(result),
                f"![A decode step over the length of the context](../images/{PICTURE.name})",
                _steps(result),
                _growth(result),
                _attention(result),
                _prompt(prefill),
            ]
        )
        + "\n"
    )


def _head(result: Row) -> str:
    on = result["machine"]
    return (
        f"RocketKV at a token budget of {result['token_budget']} beside kvc-trt's own dense engine. The model:\n"
        f"{result['model']}, feed-forward 2,816, vocabulary 32,000, random weights. Caches\n"
        "are filled synthetically, and both sides take turns. Figures are medians in milliseconds; the spread is the\n"
        "distance between the quartiles over the median. *Native* steps run the [native operators](../native.md), the\n"
        "others the operators' ONNX bodies. [peers.md](peers.md) has other engines beside kvc-trt.\n\n"
        f"`python -m benchmarks.decode.onnxruntime_steps` at commit {on['commit']} on two cores of an {on['device']}, "
        f"with\nONNX Runtime {on['versions']['onnxruntime']} and native operators for {result['native']}."
    )


def _steps(result: Row) -> str:
    lines = [
        "| batch | context | dense, native | rocketkv, native | spread | ratio | dense | rocketkv | ratio | bar |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["whole_step"]:
        dense, sparse = row["full_native"], row["rocketkv_native"]
        bar = RATIO_BARS[row["context"]]
        lines.append(
            f"| {row['batch']} | {row['context'] // 1024}K | {dense['median_ms']:.1f} | {sparse['median_ms']:.1f} | "
            f"{100 * sparse['spread']:.0f} % | {row['ratio_native']:.2f} | {row['full']['median_ms']:.1f} | "
            f"{row['rocketkv']['median_ms']:.1f} | {row['ratio']:.2f} | {bar:g}: {_verdict(row, bar)} |"
        )
    return "## A whole step\n\n" + "\n".join(lines)


def _verdict(row: Row, bar: float) -> str:
    native, bodies = row["ratio_native"] >= bar, row["ratio"] >= bar
    if native == bodies:
        return "met" if native else "**missed**"
    return (
        "**missed** by native operators, met by bodies" if bodies else "met by native operators, **missed** by bodies"
    )


def _growth(result: Row) -> str:
    rows = [row for row in result["whole_step"] if row["batch"] == max(one["batch"] for one in result["whole_step"])]
    first, last = rows[0], rows[-1]
    growth = last["rocketkv_native"]["median_ms"] / first["rocketkv_native"]["median_ms"] - 1
    return (
        f"From {first['context'] // 1024}K to {last['context'] // 1024}K the native sparse step grows by "
        f"{100 * growth:.0f} % at batch {last['batch']} (bar {100 * GROWTH_BAR:.0f} %).\n\n"
        "At batch 1 the sparse step mostly reads its 492 MB of weights. The dense engine reads them too, so bytes\n"
        "alone allow ratios of 1.55, 2.1 and 5.4; the rest is computation that the dense engine does and the sparse\n"
        "one does not. Ratios at batch 1 also depend most on the memory bandwidth, which other programs share."
    )


def _attention(result: Row) -> str:
    lines = ["| threads | ratio, native | ratio, bodies | bar |", "|---|---|---|---|"]
    for row in result["attention_alone"]:
        bar = ATTENTION_BARS[row["threads"]]
        verdict = _verdict(row, bar)
        lines.append(f"| {row['threads']} | {row['ratio_native']:.0f} | {row['ratio']:.0f} | {bar:g}: {verdict} |")
    one = result["attention_alone"][0]
    return (
        f"## One layer's attention alone\n\nHeads {one['heads']} (query, KV, size), {one['context'] // 1024}K "
        "tokens, batch 1: the time of dense attention over RocketKV's.\n\n" + "\n".join(lines)
    )


def _prompt(result: Row) -> str:
    prefill = result["prefill_memory"]
    return "## A long prompt\n\n" + paragraph(
        f"`python -m benchmarks.prefill.memory` at commit {result['machine']['commit']}: a prompt of "
        f"{prefill['tokens'] // 1024}K tokens takes {prefill['prefill_s']:.0f} s and "
        f"{prefill['peak_above_weights_bytes'] / 1e9:.2f} GB above the weights "
        f"(bar {prefill['memory_bar_bytes'] / 1e9:.0f} GB). Compaction is "
        f"{100 * prefill['compaction_share']:.1f} % of that time (bar {100 * prefill['compaction_bar']:.0f} %)."
    )


def main() -> None:
    result = read("decode_onnxruntime")
    PICTURE.write_text(picture(result), encoding="utf-8")
    PAGE.write_text(page(result, read("prefill_memory")), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
