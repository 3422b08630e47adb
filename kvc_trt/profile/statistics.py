"""Summaries of timing samples, with the names of serving benchmarks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PERCENTILES = (50, 90, 99)


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the value below which `percent` of the samples are, interpolated linearly."""
    if not samples:
        raise ValueError("samples: expected at least one, found none")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent: expected 0..100, found {percent}")
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True)
class Summary:
    """The distribution of samples in seconds."""

    samples: int
    mean: float
    median: float
    std: float
    minimum: float
    maximum: float
    p50: float
    p90: float
    p99: float

    @property
    def noise_percent(self) -> float:
        """Standard deviation over mean, in percent."""
        return 100 * self.std / self.mean if self.mean else 0.0

    def milliseconds(self, name: str) -> dict[str, float]:
        """Return flat fields `{mean,median,std,p50,p90,p99}_NAME_ms`, as in vLLM and trtllm-bench."""
        return {
            f"{kind}_{name}_ms": 1e3 * getattr(self, kind) for kind in ("mean", "median", "std", "p50", "p90", "p99")
        }


def summarise(samples: Sequence[float]) -> Summary:
    """Summarise one or more samples; the standard deviation is that of the sample (n - 1)."""
    count = len(samples)
    quantiles = [percentile(samples, percent) for percent in PERCENTILES]
    mean = math.fsum(samples) / count
    variance = math.fsum((sample - mean) ** 2 for sample in samples) / max(1, count - 1)
    return Summary(count, mean, quantiles[0], math.sqrt(variance), min(samples), max(samples), *quantiles)
