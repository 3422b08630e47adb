"""The page of the study of drafts over length, written from its records."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.page import paragraph, plot, table, written_by
from benchmarks.studies.drafts.measure import (
    CAPACITY,
    COPY,
    DRAFT,
    NAME,
    PLAIN,
    SIDES,
    SPECULATING,
    SUMMARY,
    TASKS,
    TOKENS,
    measure,
)
from benchmarks.studies.figures import LineAxes, Panel, lines
from benchmarks.studies.findings import Estimate, Finding, overview, verdict
from benchmarks.studies.records import Record, measured_on, of_kind
from benchmarks.studies.study import Study, Written, image

SNAPKV, FULL = SIDES


def page(records: Sequence[Record]) -> Written:
    """Write the page."""
    head, lengths = records[0]["key"], lengths_of(records)
    parts = [
        "# Study: drafts over length",
        written_by(f"python -m benchmarks.studies {NAME}"),
        paragraph(
            "Appendix A of [SnapKV](../../policies/snapkv.md) (NeurIPS 2024; arXiv 2404.14469) runs it with Medusa, "
            "whose extra heads draft several tokens that one step checks. Such heads have to be trained for each "
            "model, so its figures cannot be repeated here; drafts come from [repeated text](../../speculation.md). "
            "The question stays: are drafts accepted when the prompt is compressed, and does a step save as much on "
            "long prompts?"
        ),
        overview([_holds_up(records), _compression(records)]),
        plot(image(NAME, "speed-up"), STUDY.path),
        _table(records),
        paragraph(
            f"Speed-ups are by time of the processor from an answer's first token to its last; answers have {TOKENS} "
            f"tokens, a draft has up to {DRAFT}, and a pass checks one. *Beside step by step* is the same policy "
            "without drafts, *beside the whole cache* the whole cache without drafts. Means over prompts. Passes run "
            "only where they are likely to save time, so few run where little is accepted."
        ),
        "## How it was measured",
        paragraph(
            f"{head['model']}, 32-bit floats, ONNX Runtime; `{SIDES[SNAPKV]}` and `full`. A prompt is a piece of "
            f"Python's documentation and a request behind it: to {COPY} of the request word by word, or to {SUMMARY} "
            f"the documentation. {len(records)} prompts of {', '.join(f'{one:,}' for one in lengths)} tokens with the "
            "answer, each answered greedily four times from one prefill. Where the two best logits are closer than "
            "rounding, a pass may go on with the other token; *same tokens* counts how many of an answer's agree at "
            f"their places. {measured_on(records, NAME)}."
        ),
    ]
    return Written("\n\n".join(parts) + "\n", {image(NAME, "speed-up"): _plot(records)})


def lengths_of(records: Sequence[Record]) -> list[int]:
    """Return the lengths that were measured, ascending."""
    return sorted({one["key"]["length"] for one in records})


def _speed_up(one: Record, side: str, beside: str) -> float:
    """Return the ratio of another side's processor time step by step to this side's with drafts."""
    plain: float = one["measured"][beside][PLAIN]["processor_seconds"]
    return plain / float(one["measured"][side][SPECULATING]["processor_seconds"])


def _accepted(some: Sequence[Record], side: str) -> float | None:
    """Accepted tokens of a pass; None without passes."""
    passes = sum(one["measured"][side][SPECULATING]["passes"] for one in some)
    accepted = sum(one["measured"][side][SPECULATING]["accepted"] for one in some)
    return accepted / passes if passes else None


def _times(one: Estimate) -> str:
    return f"{one.mean:.2f} ({one.low:.2f} to {one.high:.2f})"


def _of(records: Sequence[Record], **wanted: object) -> Estimate:
    return Estimate.of([_speed_up(one, SNAPKV, SNAPKV) for one in of_kind(records, **wanted)])


def _holds_up(records: Sequence[Record]) -> Finding:
    shortest, *_, longest = (lengths := lengths_of(records)) * (2 if len(lengths) == 1 else 1)
    short, long = (_of(records, task=COPY, length=length) for length in (shortest, longest))
    return Finding(
        "Parallel decoding slows down as sequences grow; with SnapKV it keeps its speed (appendix A)",
        f"drafts under `{SNAPKV}`, text that repeats: {_times(short)} times as fast as steps at {shortest:,} tokens, "
        f"{_times(long)} at {longest:,}",
        long.count,
        verdict(long.low > 1, long.mean > 0.9 * short.mean),
    )


def _compression(records: Sequence[Record]) -> Finding:
    longest = max(lengths_of(records))
    some = of_kind(records, length=longest)
    own = Estimate.of([_speed_up(one, SNAPKV, FULL) for one in some])
    beside = Estimate.of(
        [
            one["measured"][FULL][SPECULATING]["processor_seconds"]
            / one["measured"][SNAPKV][SPECULATING]["processor_seconds"]
            for one in some
        ]
    )
    return Finding(
        "1.3 times Medusa alone and 2.2 times native decoding at 10K tokens (Mistral-7B, a GPU)",
        f"at {longest:,} tokens, both tasks: {_times(beside)} times the whole cache with drafts, {_times(own)} times "
        "the whole cache without",
        own.count,
        verdict(beside.low > 1, own.low > 1),
    )


def _table(records: Sequence[Record]) -> str:
    rows = []
    for length in lengths_of(records):
        for task in TASKS:
            some = of_kind(records, length=length, task=task)
            if not some:
                continue
            for side in SIDES:
                own = [one["measured"][side] for one in some]
                accepted = _accepted(some, side)
                speeds = [
                    f"{statistics.fmean(_speed_up(one, side, beside) for one in some):.2f}" for beside in (side, FULL)
                ]
                passes = statistics.fmean(one[SPECULATING]["passes"] for one in own)
                step = 1000 * statistics.fmean(one[PLAIN]["processor_seconds"] for one in own) / (TOKENS - 1)
                rows.append((
                    f"{length:,}", task, f"`{side}`", f"{passes:.0f}",
                    "n/a" if accepted is None else f"{accepted:.1f}", f"{step:.1f}", *speeds,
                    f"{statistics.fmean(one['same_tokens'] for one in own):.0f}", str(len(some)),
                ))  # fmt: skip
    heads = ("tokens", "task", "policy", "passes of an answer", "accepted of a draft", "ms of a step",
             "beside step by step", "beside the whole cache", f"same tokens of {TOKENS}", "n")  # fmt: skip
    return table(heads, rows)


def _plot(records: Sequence[Record]) -> bytes:
    lengths = lengths_of(records)
    panels = [
        Panel(
            task,
            {
                f"{side}, {way}": [_rate(of_kind(records, length=length, task=task), side, way) for length in lengths]
                for side in SIDES
                for way in (PLAIN, SPECULATING)
            },
        )
        for task in TASKS
    ]
    highest = max(rate for panel in panels for line in panel.lines.values() for rate in line if rate)
    axes = LineAxes("tokens of prompt and answer", "tokens per second of the processor", ticks=lengths,
                    limits=(0.0, 1.1 * highest))  # fmt: skip
    return lines(f"Answers of {TOKENS} tokens; SnapKV keeps {CAPACITY:,} of a prompt", panels, axes)


def _rate(some: Sequence[Record], side: str, way: str) -> float | None:
    """Return tokens per second, over all prompts together; None where there are none."""
    seconds = sum(one["measured"][side][way]["processor_seconds"] for one in some)
    return len(some) * (TOKENS - 1) / seconds if some else None


STUDY = Study(NAME, measure, page)
