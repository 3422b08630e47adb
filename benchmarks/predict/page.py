"""docs/kernels.md: its predicted part, written between two marks from the result alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks import machine, store
from benchmarks.page import paragraph
from benchmarks.predict.bars import Bar, bars, case_text, storage_text
from benchmarks.predict.hardware import COPY_SHARE
from kvc_trt.methods.base.parameters import DEFAULT
from kvc_trt.profile.accelerators import HOPPER

PAGE = machine.ROOT / "docs" / "kernels.md"
RESULT = store.RESULTS / "predicted" / "kernels.json"
BEGIN = "<!-- predicted: begin (python -m benchmarks.predict writes this part) -->"
END = "<!-- predicted: end -->"
Entry = Mapping[str, Any]


def read() -> dict[str, Any]:
    """Return the result as it was written."""
    return store.read(RESULT)


def whole(page: str, result: Entry) -> str:
    """Return the page with the predicted part that follows from the result."""
    before, after = page.index(BEGIN) + len(BEGIN), page.index(END)
    return f"{page[:before]}\n{predicted(result)}\n{page[after:]}"


def predicted(result: Entry) -> str:
    """Return the text between the marks of the page."""
    now, before = result["now"], result["before"]
    gpus = " / ".join(gpu.name for gpu in HOPPER)
    return "\n".join([
        "## Bars",
        "",
        "*Measured* is filled by the command beside it, on a GPU. *Predicted* comes from the model: the bar would be",
        f"met, or missed. Llama-3.1-8B, bf16, context 32K, on {gpus}.",
        "",
        _of_floors(list(bars(now))),
        "",
        *_bar_table(now),
        "",
        "## Predicted times",
        "",
        _origin("Now", now),
        _origin("Before", before),
        f"One layer; times in microseconds on {gpus}, without the edge of the CUDA graph before each kernel.",
        "Instructions are those of whole warps, per page scored, token read or token of the prompt, of one KV head.",
        "*Rounds*: of blocks that are resident together. *Bound by*: what decides the time on the H200. An arrow leads",
        "from before to now.",
        "",
        *_kernel_table(now, before),
        "",
        "Whole calls, with their edges, beside the floor:",
        "",
        *_call_table(now, before),
        "",
        "How well the instruction counts agree with what the emulation counted for itself, operation by operation:",
        "",
        *_check_table(now),
    ])  # fmt: skip


def _origin(title: str, snapshot: Entry) -> str:
    return (
        f"*{title}*: commit {snapshot['commit']}, sources {snapshot['sources']}, nvcc {snapshot['nvcc']}, "
        f"{snapshot['architecture']}; nothing was measured.  "
    )


def _of_floors(found: Sequence[Bar]) -> str:
    """Name the floors that the shares are of, and the number of bars met only because of them."""
    shares = [bar for bar in found if bar.of_published is not None]
    only = sum(bar.met and not bar.met_of_published for bar in shares)
    return paragraph(
        f"Shares of a floor are of the floor at {100 * COPY_SHARE:.0f} % of the published bandwidth, which a GPU's "
        "memory is taken to reach. The last column sets the same prediction against the stricter floor at the "
        f"published bandwidth. Of {len(shares)} predicted shares (two GPUs each), **{only} are met only because the "
        "floor is at the lower bandwidth**."
    )


def _bar_table(now: Entry) -> list[str]:
    """One row for each bar and case; both GPUs in a cell."""
    found: dict[tuple[str, str], list[Bar]] = {}
    for bar in bars(now):
        found.setdefault((bar.text, bar.case), []).append(bar)
    rows = []
    for text, case in sorted(found, key=lambda key: list(dict.fromkeys(one[0] for one in found)).index(key[0])):
        same = found[text, case]
        limit = f"{'<=' if same[0].at_most else '>='} {same[0].limit:g} {same[0].unit}"
        values = " / ".join(_verdict(bar.predicted, bar.unit, bar.met) for bar in same)
        published = " / ".join(
            _verdict(bar.of_published, bar.unit, bar.met_of_published) for bar in same if bar.of_published is not None
        )
        rows.append([text, case, limit, f"not run: `{same[0].command}`", values, published or "-"])
    return _table(("bar", "case", "limit", "measured", "predicted", "at the published bandwidth"), rows)


def _verdict(value: float, unit: str, met: bool) -> str:
    return f"{value:.1f} {unit} ({'met' if met else 'missed'})"


def _kernel_table(now: Entry, before: Entry) -> list[str]:
    earlier = {_key(one): one for one in before["kernels"]}
    rows = []
    for one in now["kernels"]:
        old = earlier.get(_key(one), {})
        rows.append([
            f"`{one['kernel']}`",
            _text(one),
            _change(old, one, lambda entry: f"{entry['instructions_per_unit']:g}") + f" / {one['unit']}",
            _change(old, one, lambda entry: str(entry["registers"])),
            _change(old, one, lambda entry: str(entry["static_shared"] + entry["dynamic_shared"])),
            _change(old, one, lambda entry: f"{entry['code_bytes'] / 1024:.1f}"),
            f"{one['ctas']} ({one['rounds']})",
            _change(old, one, lambda entry: _pair(entry, "predicted_us", ".2f")),
            _pair(one, "floor_us", ".2f"),
            one["gpus"][HOPPER[-1].name]["bound_by"],
        ])  # fmt: skip
    heading = "kernel|case|instructions|registers|shared, bytes|code, KiB|CTAs (rounds)|predicted|floor|bound by"
    return _table(heading.split("|"), rows)


def _call_table(now: Entry, before: Entry) -> list[str]:
    earlier = {_key(one): one for one in before["calls"]}
    rows = []
    for one in now["calls"]:
        old = earlier.get(_key(one), {})
        rows.append([
            one["operation"],
            _text(one),
            _change(old, one, lambda entry: str(entry["launches"])),
            _change(old, one, lambda entry: _pair(entry, "predicted_us", ".1f")),
            _pair(one, "floor_us", ".1f"),
            _change(old, one, lambda entry: _pair(entry, "share_of_floor", ".0%")),
        ])  # fmt: skip
    return _table(("call", "case", "launches", "predicted", "floor", "predicted share of the floor"), rows)


def _check_table(now: Entry) -> list[str]:
    rows = [
        [
            f"`{one['kernel']}`",
            one["operation"] + storage_text(one),
            *(_agreement(one.get(name, (0, 0))) for name in ("products", "exchanges", "barriers", "cluster_barriers")),
        ]
        for one in now["checks"]
    ]
    return _table(
        ("kernel", "call", "products on tensor cores", "shuffles, votes, matrix loads", "barriers", "of a cluster"),
        rows,
    )


def _agreement(pair: Sequence[float]) -> str:
    model, emulation = pair
    return f"{model:.0f} of {emulation:.0f}" if model or emulation else "-"


def _key(entry: Entry) -> tuple[Any, ...]:
    """Return the identity of an entry; earlier predictions know only the default policy."""
    return (*(entry.get(name) for name in ("operation", "kernel", "batch", "budget")), entry.get("policy", DEFAULT))


def _text(entry: Entry) -> str:
    return f"{entry['operation']}, {case_text(entry)}" if "kernel" in entry else case_text(entry)


def _pair(entry: Entry, name: str, form: str) -> str:
    return " / ".join(format(entry["gpus"][gpu.name][name], form) for gpu in HOPPER)


def _change(before: Entry, now: Entry, text: Any) -> str:
    """Return the value, and where it has changed the one before it."""
    new = text(now)
    old = text(before) if before else new
    return str(new) if old == new else f"{old} -> {new}"


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in (heading, ["---"] * len(heading), *rows)]
