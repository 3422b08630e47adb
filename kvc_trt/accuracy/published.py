"""What RocketKV's first version publishes for three models: shown beside a measurement of the same model.

arXiv 2502.14051v1, Tables 2, 8 and 14 (LongBench and needles), 4 to 7, 10 to 13 and 16 to 19 (RULER). Percentages by
token budget; `quest-matched` is its Quest (half of the budget for scores), `snapkv` its SnapKV per query head,
`rocketkv-v1` its RocketKV. The tasks here are our own: the wording and, for some, the haystack differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

SOURCE = "RocketKV, arXiv 2502.14051v1"
BUDGETS = (256, 512, 1024, 2048, 4096)
LONGBENCH = "LongBench, mean of 15 tasks"
NEEDLE = "needle in a haystack, 300 samples"
RULER = "RULER, mean of 13 tasks, 50 samples each"


@dataclass(frozen=True)
class Published:
    """One table's column: a model's scores on one benchmark at one length."""

    model: str
    """A preset's name."""
    benchmark: str
    length: int | None
    """Tokens; None where the table names none."""
    scores: str
    """A line per policy: its scores at BUDGETS, or one that holds at any; - where it does not apply."""

    @cached_property
    def by_policy(self) -> dict[str, dict[int | None, float]]:
        """Percentages by policy and token budget; the budget of full is None."""
        table: dict[str, dict[int | None, float]] = {}
        for line in self.scores.split("\n"):
            policy, colon, numbers = line.strip().partition(":")
            if colon:
                values = numbers.split()
                budgets = [None] if len(values) == 1 else list(BUDGETS)
                table[policy] = {b: float(value) for b, value in zip(budgets, values, strict=True) if value != "-"}
        return table


def published_for(model: str) -> list[Published]:
    """The columns of a preset; empty for a model that the paper does not measure."""
    return [one for one in TABLES if one.model == model]


# fmt: off
TABLES = (
    Published(
        "llama3.1-8b", LONGBENCH, None,
        """
        full: 52.2
        exact-topk: 52.6 52.2 52.2 52.1 52
        rocketkv-v1: 51.1 52.2 52.1 52.2 52.2
        hybrid: 49.5 52.1 52.5 52.2 52.1
        sparq: 25.7 43.8 51.1 52.1 52.3
        quest-matched: 17.8 35.1 45 50.5 51.9
        snapkv: - - 46.2 49.1 51
        duo-attention: 37.6 41.2 44.5 49.2 51.2
        """,
    ),
    Published(
        "llama3.1-8b", NEEDLE, None,
        """
        full: 100
        exact-topk: 100 100 100 100 100
        rocketkv-v1: 99 99.7 100 100 100
        hybrid: 44.3 73.7 94.3 100 100
        sparq: 10.3 14.7 26 56.3 89.3
        quest-matched: 10.7 18 37.3 64.3 94.3
        snapkv: 0 99 99.7 99.7 100
        duo-attention: 20 21 26.3 28.3 36.7
        """,
    ),
    Published(
        "mistral-7b-v0.2", LONGBENCH, None,
        """
        full: 45.4
        exact-topk: 45.3 45.3 45.2 45.2 45.2
        rocketkv-v1: 42.9 44.1 44.6 45 45.1
        hybrid: 37 43.5 44.8 45.2 45.3
        sparq: 7 10.6 16.3 24.5 38.9
        quest-matched: 13.1 26.4 36.9 42.3 44.7
        snapkv: - - 39.9 42.6 43.6
        duo-attention: 28.3 30.8 32.6 35.7 40.6
        """,
    ),
    Published(
        "mistral-7b-v0.2", NEEDLE, None,
        """
        full: 99
        exact-topk: 98.7 99.3 99.3 99.3 99.3
        rocketkv-v1: 97.7 98.7 98.7 99.3 99.3
        hybrid: 56.7 85.7 97.7 99 99.3
        sparq: 10 11.7 20 27 50.3
        quest-matched: 14 39.7 79.3 90.3 96
        snapkv: 2.3 39.3 53.3 62.3 76.7
        duo-attention: 22 24 30 41 62
        """,
    ),
    Published(
        "longchat-7b-v1.5-32k", LONGBENCH, None,
        """
        full: 37.5
        exact-topk: 36.6 36.8 36.7 36.8 36.9
        rocketkv-v1: 33.8 34.9 35.7 36.4 36.8
        hybrid: 34.1 36.3 36.7 36.8 36.8
        sparq: 16.9 30.9 36.1 36.7 36.8
        quest-matched: 11.8 24.2 33.8 36.3 36.8
        snapkv: - - 34.9 36 36.8
        duo-attention: 21.7 26.1 28.5 30.9 34.1
        """,
    ),
    Published(
        "longchat-7b-v1.5-32k", NEEDLE, None,
        """
        full: 96.3
        exact-topk: 96.7 96.3 96.3 96.3 96.3
        rocketkv-v1: 93.7 95.7 96.3 96.3 96
        hybrid: 58 90.7 95.7 96.3 96.3
        sparq: 21 38 76.7 96 94.3
        quest-matched: 15.3 48 77 89.7 96.3
        snapkv: 16.7 58.3 76 85 89
        duo-attention: 20.7 23.7 28 42.3 67.3
        """,
    ),
    Published(
        "llama3.1-8b", RULER, 16000,
        """
        full: 91.3
        exact-topk: 90.4 90.9 91.5 91.1 90.8
        rocketkv-v1: 86.4 88.1 90.2 90.9 91.2
        hybrid: 69 83.5 89.5 90.8 92.3
        sparq: 8.7 27 86.5 92 92.2
        quest-matched: 5.3 39.2 64.6 74.4 88.7
        snapkv: 8 30 53.8 63.8 70.7
        duo-attention: 12.2 13.9 13.6 20.9 67.7
        """,
    ),
    Published(
        "llama3.1-8b", RULER, 32000,
        """
        full: 86.4
        exact-topk: 85.8 86 85.6 86.1 86.4
        rocketkv-v1: 83.1 85 85.4 86.2 86.6
        hybrid: 51.6 71.2 83.4 85.6 85.9
        sparq: 6 11.1 31 80.7 86.7
        quest-matched: 1.8 17.7 38.8 53.1 73
        snapkv: 6.9 27.9 50.3 59.3 65.7
        duo-attention: 11.4 13.2 13.7 14.2 22.5
        """,
    ),
    Published(
        "llama3.1-8b", RULER, 64000,
        """
        full: 84.9
        exact-topk: 79.6 82 83.8 84.1 84.5
        rocketkv-v1: 79.2 81.7 82.9 83.8 84.8
        hybrid: 22.8 52.7 72.5 79.4 83.2
        sparq: 0 4.3 9.7 33.6 77
        quest-matched: 2.1 3.5 21.9 50.7 59.7
        snapkv: 6.5 25.7 44.6 55.5 60.7
        duo-attention: 13.7 14 14.4 14.4 14.7
        """,
    ),
    Published(
        "llama3.1-8b", RULER, 96000,
        """
        full: 80.8
        exact-topk: 72.9 74.6 77.1 79.1 80.1
        rocketkv-v1: 57.5 69.5 76.3 78 78.8
        hybrid: 1.9 21.2 48.5 66.4 72.8
        sparq: 0 0 4.2 5.6 42.3
        quest-matched: 1.7 2.3 13.7 31.6 46.9
        snapkv: 6.5 22.4 33.5 44.3 52.8
        duo-attention: 10.2 12.7 12.9 12.8 13.4
        """,
    ),
    Published(
        "mistral-7b-v0.2", RULER, 8000,
        """
        full: 89.2
        exact-topk: 89.5 89.6 89.5 89.5 89.4
        rocketkv-v1: 85.5 88 88.8 90 90.2
        hybrid: 65 85.5 88.7 89 89.4
        sparq: 1.8 8.3 38 86.9 89.3
        quest-matched: 22 55.3 69.7 87.1 89.4
        snapkv: 7.9 23 45.2 56.1 64.1
        duo-attention: 12.5 15.5 19.8 40.7 87.9
        """,
    ),
    Published(
        "mistral-7b-v0.2", RULER, 16000,
        """
        full: 84.6
        exact-topk: 84.3 84.7 85 85.2 85
        rocketkv-v1: 78.4 79.9 82.3 84.2 85.3
        hybrid: 39.7 68.4 80.9 83.4 84.7
        sparq: 0.2 0.8 5.3 13.1 72.3
        quest-matched: 3.4 34.9 55.9 67 84
        snapkv: 6.3 17.6 38.3 46.9 55.1
        duo-attention: 10.8 13 15.6 17.3 39.4
        """,
    ),
    Published(
        "mistral-7b-v0.2", RULER, 24000,
        """
        full: 81.3
        exact-topk: 82.1 82.6 82.6 82.4 81.7
        rocketkv-v1: 72.6 78.6 79.7 81.6 82.1
        hybrid: 30.4 51.9 72 79.8 82.3
        sparq: 0.5 0.2 0.6 11.3 10.8
        quest-matched: 1.8 19.8 41.3 58 70.5
        snapkv: 6 16.5 35.2 44.6 51.1
        duo-attention: 10.2 12.3 13 12.9 21.4
        """,
    ),
    Published(
        "mistral-7b-v0.2", RULER, 32000,
        """
        full: 78.3
        exact-topk: 72.8 74.1 76 77 77.4
        rocketkv-v1: 58.6 73.8 74.9 78.1 79.2
        hybrid: 21.4 37.7 56.6 70.9 75
        sparq: 0.2 0.2 0.7 5.8 8
        quest-matched: 1.9 14.7 36.8 51.3 60.5
        snapkv: 4.5 14.8 30.7 39.9 45.4
        duo-attention: 8 12.3 12.7 13.2 15.8
        """,
    ),
    Published(
        "longchat-7b-v1.5-32k", RULER, 8000,
        """
        full: 82.3
        exact-topk: 80.7 81.3 82 82.6 82.5
        rocketkv-v1: 69.1 78 79.9 81.7 82.2
        hybrid: 68 77.5 81.3 82 82.6
        sparq: 13.7 62.2 80.3 82.5 82.5
        quest-matched: 20.1 46.8 65.4 82.2 82.3
        snapkv: 25.8 43 54.9 66.1 76.1
        duo-attention: 5.2 11.6 13.2 46.4 80.3
        """,
    ),
    Published(
        "longchat-7b-v1.5-32k", RULER, 16000,
        """
        full: 72.7
        exact-topk: 72.3 72.8 73.1 73.3 72.8
        rocketkv-v1: 63.1 70.9 72.2 73 71.8
        hybrid: 41.2 61.5 69.3 73.8 73.6
        sparq: 3 23.6 66.7 73.5 73
        quest-matched: 1.4 21.5 48.1 64.3 74.1
        snapkv: 22.5 35.1 43 49.2 57.9
        duo-attention: 5.2 10.7 12.4 13.8 52.8
        """,
    ),
    Published(
        "longchat-7b-v1.5-32k", RULER, 24000,
        """
        full: 63.9
        exact-topk: 61.3 62.1 62.2 62.8 63.4
        rocketkv-v1: 56.8 58.7 60.7 63.8 63.5
        hybrid: 24.7 49.3 60.1 63 62.5
        sparq: 0.2 7.9 31 61.6 62.5
        quest-matched: 1.4 15.1 36.6 50.5 64.6
        snapkv: 18.9 26.4 32 38.4 45
        duo-attention: 4.4 9.6 9.9 10.2 13.4
        """,
    ),
    Published(
        "longchat-7b-v1.5-32k", RULER, 32000,
        """
        full: 55.9
        exact-topk: 53.7 55.5 55.4 55.4 55.7
        rocketkv-v1: 40.9 48.3 50.5 53.6 55
        hybrid: 12.1 22.3 42.1 51.7 55.2
        sparq: 0 2.7 14.6 44.6 54.5
        quest-matched: 0.4 4.1 18.2 37 51.7
        snapkv: 12.8 17.6 22 28.1 33.9
        duo-attention: 4.7 8.1 8 8.1 10.1
        """,
    ),
)
# fmt: on
