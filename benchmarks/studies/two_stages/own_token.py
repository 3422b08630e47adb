"""The effect of a step reading its own token, on an answer and on plain text.

    python -m benchmarks.studies.two_stages.own_token   # benchmarks/results/own_tokens.json; minutes

Hybrid attention ranks the newest page like any other. A page of one fresh token has exact bounds, those of a full page
promise more than any key of it holds, so the page that a token begins may be left out by the token's own step. The
tokens kept of a prompt decide which tokens of an answer begin a page: so needles are asked for with every number of
kept tokens beyond whole pages, and in plain text steps are told apart by their place in a page.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks import machine, store
from benchmarks.page import paragraph, table
from benchmarks.studies import texts
from benchmarks.studies.findings import ENOUGH, Estimate
from benchmarks.studies.study import MODEL
from benchmarks.studies.two_stages.cells import BUDGETS, OUTPUT, PUBLISHED, Cell, Second
from benchmarks.studies.two_stages.measure import Staged, asked, depth_of
from benchmarks.studies.watched import StudyModel, open_study_model
from kvc_trt import policies
from kvc_trt.models.config import ModelConfig

NAME, COMMAND = "own_tokens", "python -m benchmarks.studies.two_stages.own_token"
LENGTH, NEEDLES, CONTINUED = 2048, 6, 96
PAGE, KEPT = 4, 816
"""Kept tokens that are whole pages; a few more are kept beside."""
RECENT = (0, 1, 4, 16)
"""Last tokens that are always read; 4 are at least a page of every setting."""
HALF = "half"


def stages(config: ModelConfig) -> Iterator[tuple[str, int, Second]]:
    """Yield a name, the kept tokens and stage 2 of every setting, without a remainder: *half* and the policy's own."""
    yield HALF, KEPT, Second("hybrid", PAGE, config.head_size // 2, KEPT // 2)
    for budget in BUDGETS:
        rule = policies.resolve(
            "rocketkv", model=config, token_budget=budget, max_input_len=LENGTH, max_output_len=OUTPUT
        )
        whole = rule.prompt_budget // rule.page_size * rule.page_size
        yield f"rocketkv, {budget}", whole, Second("hybrid", rule.page_size, rule.top_r, rule.top_k)


def cells(config: ModelConfig, remainders: bool) -> list[Cell]:
    """Return every setting with every remainder, or with none, and every number of tokens always read."""
    return [
        Cell(PUBLISHED, kept + rest, replace(second, recent=recent), name, rest)
        for name, kept, second in stages(config)
        for rest in range(second.page if remainders else 1)
        for recent in RECENT
    ]


def by_step(whole: torch.Tensor, other: torch.Tensor) -> list[float]:
    """Return KL(whole || other) of logits [M,vocab], in nats, of each of M steps."""
    one, two = (torch.log_softmax(logits, dim=-1) for logits in (whole, other))
    return [round(value, 4) for value in (one.exp() * (one - two)).sum(dim=-1).tolist()]


def needle(model: StudyModel, index: int) -> list[dict[str, Any]]:
    """Hide one needle and ask for it in the prompt; return the records of `along`."""
    prompt, _, answer = asked(model, LENGTH, depth_of(index), index)
    return along(model, prompt, answer, cells(model.decoder.config, remainders=True))


def text(model: StudyModel, index: int) -> list[dict[str, Any]]:
    """Read plain text behind a prompt; return records as `needle` does, without remainders."""
    ids = model.tokenizer.encode(texts.manual(model.tokenizer, index, LENGTH + CONTINUED).text)
    return along(model, ids[:LENGTH], ids[LENGTH:], cells(model.decoder.config, remainders=False))


def along(
    model: StudyModel, prompt: Sequence[int], following: Sequence[int], of: Sequence[Cell]
) -> list[dict[str, Any]]:
    """Feed tokens behind a prompt; return for each cell and step nats, own token read, and its place in its page.

    The place is 0 where the token begins a page."""
    staged = Staged(of, 0)
    whole, *others = model.decoder.along(prompt, following, staged)
    return [
        {
            "nats": by_step(whole[1:], each[1:]),
            "own": [round(share, 3) for share in own],
            "slots": [(cell.kept + step) % cell.second.page for step in range(len(own))],
        }
        for cell, each, own in zip(of, others, staged.own, strict=True)
    ]


def section() -> str:
    """Write the part of the page."""
    found = store.recorded(NAME, COMMAND)
    needles, of_texts = found["needles"], found["texts"]
    parts = [
        "## Whether a step reads its own token",
        paragraph(
            "Hybrid attention ranks the newest page like any other. Bounds of a page of few fresh tokens are near "
            "these tokens' keys, those of a full page promise more than any key of it holds. So steps leave out their "
            "own token, and those just before it, most of all where a page begins; which tokens of an answer begin one "
            "follows from how many tokens of the prompt are kept. *Recent* is how many last tokens are read in any "
            "case, within the tokens that a step attends to; policies, as the paper, read none unless `--set recent=N` "
            "says so ([0052](../../decisions/0052-last-tokens.md)). *Half* keeps "
            f"{KEPT} tokens and a few beyond whole pages of {PAGE}, scores pages on half of the channels and reads "
            f"half of the tokens; the other settings are the policy's own. {_count(needles)} needles in about "
            f"{LENGTH:,} tokens, asked for in the prompt: the mean over settings is {_change(_less(needles))}. "
            f"{_worst(needles)}"
        ),
        _table(needles),
    ]
    if of_texts and _count(of_texts):
        parts += [
            paragraph(
                f"Plain text, {_count(of_texts)} pieces of Python's manual: {CONTINUED} tokens follow a prompt of "
                f"{LENGTH:,}. The mean over settings is {_change(_less(of_texts))}."
            ),
            _table(of_texts),
        ]
    commit = found["machine"]["commit"]
    warning = "" if _count(needles) >= ENOUGH else f" With fewer than {ENOUGH} of a kind intervals are too narrow."
    return "\n\n".join([*parts, paragraph(f"`{COMMAND}`, commit {commit}.{warning}")])


def _count(rows: Sequence[Mapping[str, Any]]) -> int:
    return len(rows[0]["measured"])


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    return table(
        ("setting", "kept beyond whole pages", *HEADS, *(f"recent {recent}: nats" for recent in RECENT)), _shown(rows)
    )


def _worst(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write the loss of the setting that loses most, for each number of last tokens."""
    worst = max((one for one in rows if not one["recent"]), key=lambda one: statistics.fmean(_means(one)))
    own = {one["recent"]: one for one in rows if all(one[name] == worst[name] for name in ("setting", "beyond"))}
    nats = {recent: Estimate.of(_means(own[recent])) for recent in RECENT}
    said = ", ".join(
        f"{one.mean:.3f} ({one.low:.3f} to {one.high:.3f}) with recent {recent}" for recent, one in nats.items()
    )
    return f"Most is lost by *{worst['setting']}* with {worst['beyond']} tokens beyond whole pages: {said}."


HEADS = ("own token read where it begins a page, %", "elsewhere, %", "nats where it begins a page", "elsewhere")
"""Columns about steps that read no token in any case."""


def _change(less: Mapping[int, Estimate]) -> str:
    return ", ".join(
        f"{one.mean:+.3f} nats ({one.low:+.3f} to {one.high:+.3f}) with recent {recent}" for recent, one in less.items()
    )


def _less(rows: Sequence[Mapping[str, Any]]) -> dict[int, Estimate]:
    """Return by `recent` the difference from none, a mean over settings for each needle or text."""
    means = {}
    for recent in RECENT:
        of_settings = [_means(one) for one in rows if one["recent"] == recent]
        means[recent] = [statistics.fmean(values) for values in zip(*of_settings, strict=True)]
    return {
        recent: Estimate.of([a - b for a, b in zip(means[recent], means[0], strict=True)])
        for recent in RECENT
        if recent
    }


def _means(row: Mapping[str, Any]) -> list[float]:
    """Return the mean over steps of each needle or text, in nats."""
    return [statistics.fmean(one["nats"]) for one in row["measured"]]


def _shown(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield a row of the table for each setting and remainder."""
    for name, beyond in dict.fromkeys((one["setting"], one["beyond"]) for one in rows):
        own = {one["recent"]: one for one in rows if (one["setting"], one["beyond"]) == (name, beyond)}
        parts = [
            split(own[0]["measured"], field, begins=begins) for field in ("own", "nats") for begins in (True, False)
        ]
        shares = [f"{100 * statistics.fmean(one):.0f}" if one else "-" for one in parts[:2]]
        nats = [f"{statistics.fmean(one):.3f}" if one else "-" for one in parts[2:]]
        yield [name, str(beyond), *shares, *nats, *(f"{statistics.fmean(_means(own[one])):.3f}" for one in RECENT)]


def split(measured: Sequence[Mapping[str, Any]], field: str, *, begins: bool) -> list[float]:
    """Return the values of all steps whose token begins a page, or of all others."""
    return [
        value for one in measured for value, slot in zip(one[field], one["slots"], strict=True) if (slot == 0) == begins
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=NEEDLES, help="needles, and half as many texts")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    record = machine.record()
    model = open_study_model(MODEL, LENGTH + CONTINUED + 64)
    config = model.decoder.config
    found: dict[str, list[list[dict[str, Any]]]] = {"needles": [], "texts": []}
    for kind, measured, count in (("needles", needle, options.count), ("texts", text, options.count // 2)):
        for index in range(count):
            found[kind].append(measured(model, index))
            store.write_result(NAME, {
                "machine": record, "model": model.name, "checkpoint": model.fingerprint,
                "needles": _rows(cells(config, remainders=True), found["needles"]),
                "texts": _rows(cells(config, remainders=False), found["texts"]),
            })  # fmt: skip


def _rows(of: Sequence[Cell], measured: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a record of each cell with the measurements of every needle or text."""
    return [{**_named(cell), "measured": [one[at] for one in measured]} for at, cell in enumerate(of)]


def _named(cell: Cell) -> dict[str, Any]:
    return {"setting": cell.setting, "beyond": cell.size, "recent": cell.second.recent, "page": cell.second.page}


if __name__ == "__main__":
    main()
