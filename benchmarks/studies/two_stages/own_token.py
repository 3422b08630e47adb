"""Whether a step reads its own token, and what that does to an answer and to plain text.

    python -m benchmarks.studies.two_stages.own_token   # benchmarks/results/own_tokens.json; minutes

Hybrid attention ranks the newest page like any other. A page of one fresh token has exact bounds, those of a full page
promise more than any key of it holds, so the page that a token begins may be left out by the token's own step. The
tokens kept of a prompt decide which tokens of an answer begin a page: so needles are asked for with every number of
kept tokens beyond whole pages, and in plain text steps are told apart by their place in a page.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks import machine, store
from benchmarks.studies import texts
from benchmarks.studies.study import MODEL
from benchmarks.studies.two_stages.cells import BUDGETS, OUTPUT, PUBLISHED, Cell, Second
from benchmarks.studies.two_stages.measure import BEHIND, IN, Staged, asked, depth_of
from benchmarks.studies.watched import Branch, StudyModel, open_study_model
from kvc_trt import policies
from kvc_trt.models.config import ModelConfig

NAME, COMMAND = "own_tokens", "python -m benchmarks.studies.two_stages.own_token"
LENGTH, NEEDLES, TEXTS, CONTINUED = 2048, 6, 6, 192
PAGES, KEPT = (2, 3, 4), 816
"""Kept tokens that are whole pages of each size; a few more are kept beside."""
RECENT = (0, 1, 4, 16, 32)
"""Last tokens that are always read."""
HALF = "half"


def stages(config: ModelConfig) -> Iterator[tuple[str, int, Second]]:
    """Yield a name, the kept tokens and stage 2 of every setting, without a remainder: *half* and the policy's own."""
    for page in PAGES:
        yield f"{HALF}, pages of {page}", KEPT, Second("hybrid", page, config.head_size // 2, KEPT // 2)
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


def needle(model: StudyModel, index: int) -> dict[str, list[dict[str, Any]]]:
    """Hide one needle and ask for it at both places; return for each cell and step nats, own token read, its place.

    The place of a token in its page is 0 where the token begins one."""
    prompt, framed, answer = asked(model, LENGTH, depth_of(index), index)
    of = cells(model.decoder.config, remainders=True)
    staged = {IN: Staged(of, 0), BEHIND: Staged(of, len(framed.question) - 1)}
    logits = model.decoder.branches(prompt, [
        Branch(len(prompt), answer, staged[IN]),
        Branch(len(framed.context), [*framed.question, *answer], staged[BEHIND]),
    ])  # fmt: skip
    found = {}
    for (place, one), (whole, *others) in zip(staged.items(), logits, strict=True):
        # Logits that the answer's own steps give: the prompt's last token is read exactly.
        steps = len(answer) - 1
        found[place] = [
            {
                "nats": by_step(whole[-steps:], each[-steps:]),
                "own": [round(share, 3) for share in own[-steps:]],
                "slots": [(cell.kept + step) % cell.second.page for step in range(len(own) - steps, len(own))],
            }
            for cell, each, own in zip(of, others, one.own, strict=True)
        ]
    return found


def text(model: StudyModel, index: int) -> list[dict[str, Any]]:
    """Read plain text behind a prompt; return means of nats and own tokens read, by the place of a token in its page.

    Each cell's list has a number for each place in a page, the page's first token first."""
    whole_text = texts.manual(model.tokenizer, index, LENGTH + CONTINUED).text
    ids = model.tokenizer.encode(whole_text)
    of = cells(model.decoder.config, remainders=False)
    staged = Staged(of, 0)
    whole, *others = model.decoder.along(ids[:LENGTH], ids[LENGTH:], staged)
    found = []
    for cell, each, own in zip(of, others, staged.own, strict=True):
        nats, page = by_step(whole[1:], each[1:]), cell.second.page
        found.append({
            "nats": [round(statistics.fmean(nats[place::page]), 4) for place in range(page)],
            "own": [round(statistics.fmean(own[place::page]), 3) for place in range(page)],
        })  # fmt: skip
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=NEEDLES, help="needles, and as many texts")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    record = machine.record()
    model = open_study_model(MODEL, LENGTH + CONTINUED + 64)
    config = model.decoder.config
    measured: dict[str, list[Any]] = {"needles": [], "texts": []}
    for index in range(options.count):
        measured["needles"].append(needle(model, index))
        measured["texts"].append(text(model, index))
        rows = [
            {**_named(cell), "place": place, "steps": [one[place][at] for one in measured["needles"]]}
            for place in (IN, BEHIND)
            for at, cell in enumerate(cells(config, remainders=True))
        ]
        of_texts = [
            {**_named(cell), "places": [one[at] for one in measured["texts"]]}
            for at, cell in enumerate(cells(config, remainders=False))
        ]
        store.write_result(NAME, {
            "machine": record, "model": model.name, "checkpoint": model.fingerprint, "needles": rows, "texts": of_texts,
        })  # fmt: skip


def _named(cell: Cell) -> dict[str, Any]:
    return {"setting": cell.setting, "beyond": cell.size, "recent": cell.second.recent, "page": cell.second.page}


if __name__ == "__main__":
    main()
