"""The papers' studies: measure the missing records, and write the pages.

    python -m benchmarks.studies [hit_rates layer_importance] [--minutes 60] [--count 8] [--pages]

Goes on where it was stopped. Each study's records are benchmarks/results/studies/NAME.jsonl, and its page
docs/results/studies/NAME.md. One thread, unless --threads says otherwise.
"""

from __future__ import annotations

import argparse
import time

import torch

from benchmarks.studies.drafts import page as drafts
from benchmarks.studies.hit_rates import page as hit_rates
from benchmarks.studies.layer_importance import page as layer_importance
from benchmarks.studies.pooling import page as pooling
from benchmarks.studies.records import Records
from benchmarks.studies.squeeze import page as squeeze
from benchmarks.studies.study import MODEL, Run, Study, write_page
from benchmarks.studies.two_stages import page as two_stages

STUDIES: dict[str, Study] = {
    one.STUDY.name: one.STUDY for one in (hit_rates, layer_importance, pooling, squeeze, two_stages, drafts)
}


def main() -> None:
    """Measure the studies that are named, all of them if none is, and write their pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)}; all by default")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--checkpoint", help="the model's GGUF file, where the preset does not find it")
    parser.add_argument("--count", type=int, help="documents or prompts of each kind; each study has its own number")
    parser.add_argument("--long", action="store_true", help="lengths like those of the papers, where a study has them")
    parser.add_argument("--minutes", type=float, help="begin nothing new after so many")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pages", action="store_true", help="measure nothing: write the pages of what is there")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.studies if name not in STUDIES]:
        parser.error(f"unknown study {unknown[0]}; there are {', '.join(STUDIES)}")
    torch.set_num_threads(arguments.threads)
    until = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    run = Run(arguments.model, arguments.checkpoint, until, arguments.count, arguments.long)
    for name in arguments.studies or STUDIES:
        if not arguments.pages:
            STUDIES[name].measure(run, Records.of(name))
        print(write_page(STUDIES[name]))


if __name__ == "__main__":
    main()
