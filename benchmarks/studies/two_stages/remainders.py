"""The effect of a prompt's last page on an answer: nats by the number of kept tokens beyond whole pages.

    python -m benchmarks.studies.two_stages.remainders   # benchmarks/results/page_remainders.json; minutes

Pages of 4 on half of the channels, half of the tokens read, as *1/2 read* of the study. The first tokens of an answer
fill the last page of the prompt, so the kept tokens decide which tokens of the answer share a page.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks import machine, store
from benchmarks.page import paragraph, table
from benchmarks.studies.findings import Estimate
from benchmarks.studies.study import MODEL
from benchmarks.studies.two_stages.cells import PUBLISHED, Cell, Second
from benchmarks.studies.two_stages.measure import Staged, asked, depth_of, divergence
from benchmarks.studies.watched import StudyModel, open_study_model

NAME, COMMAND = "page_remainders", "python -m benchmarks.studies.two_stages.remainders"
PAGE, LENGTH, NEEDLES = 4, 2048, 5
KEPT = (410, 411, 816, 817, 818, 819)


def cell(kept: int, head_size: int) -> Cell:
    """Return the cell that keeps `kept` tokens."""
    return Cell(PUBLISHED, kept, Second("hybrid", PAGE, head_size // 2, kept // 2), "half", kept)


def nats(model: StudyModel, index: int) -> list[float]:
    """Return the divergence from the whole cache of each of KEPT, for one needle that the prompt asks for."""
    prompt, _, answer = asked(model, LENGTH, depth_of(index), index)
    cells = [cell(kept, model.decoder.config.head_size) for kept in KEPT]
    whole, *others = model.decoder.along(prompt, answer, Staged(cells, 0))
    return [divergence(whole[1:], each[1:]) for each in others]


def section() -> str:
    """Write the part of the page."""
    found = store.recorded(NAME, COMMAND)
    nats = {record["kept"]: record["nats"] for record in found["kept"]}
    rows = [(f"{kept}", f"{kept % PAGE}", f"{len(values)}", _shown(values)) for kept, values in nats.items()]
    return "\n\n".join([
        "## The prompt's last page",
        paragraph(
            "The first tokens of an answer fill the last page of what is kept of a prompt. So the number of kept "
            f"tokens beyond whole pages decides which of them share a page. Here pages have {PAGE} tokens, half of the "
            f"channels score them, half of the tokens are read, and prompts of about {LENGTH:,} tokens have the "
            "question. "
            + "; ".join(
                f"{kept} kept tokens lose {_shown([a - b for a, b in zip(nats[kept], nats[kept - 1], strict=True)])} "
                f"nats more than {kept - 1}"
                for kept in nats
                if kept % PAGE == PAGE - 1
            )
            + ". *1/2 read* and *quarter* keep 204, 409 and 819 tokens, which are 0, 1 and 3 beyond whole pages, so "
            "their nats at 1,024 pairs are those of this remainder too and not of the memory alone."
        ),
        table(("tokens kept", "beyond whole pages", "n", "nats (95 % interval)"), rows),
        paragraph(f"`{COMMAND}`, commit {found['machine']['commit']}."),
    ])  # fmt: skip


def _shown(values: Sequence[float]) -> str:
    one = Estimate.of(values)
    return f"{one.mean:.3f} ({one.low:.3f} to {one.high:.3f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=NEEDLES, help="needles")
    options = parser.parse_args(arguments)
    record = machine.record()
    model = open_study_model(MODEL, LENGTH + 64)
    columns = zip(*(nats(model, index) for index in range(options.count)), strict=True)
    kept = [
        {"kept": one, "nats": [round(value, 4) for value in values]} for one, values in zip(KEPT, columns, strict=True)
    ]
    store.write_result(NAME, {"machine": record, "model": model.name, "checkpoint": model.fingerprint, "kept": kept})


if __name__ == "__main__":
    main()
