"""Predict from floors the requests of several lengths that a GPU answers each second.

The model: a fixed number of callers, each of whom asks again when an answer ends. As many requests as fit decode
together; the others wait. A GPU either reads one prompt or takes one step of all rows, so one request occupies it for
its prefill, and for its share of the steps in which it is a row:

    seconds per request = E[prefill] + E[steps] * step / rows

A kind of request makes up a share of a step's rows in proportion to its weight times its steps. The model leaves out
the time between steps, scheduling, and sums between GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from kvc_trt.errors import InputError
from kvc_trt.profile.accelerators import Accelerator
from kvc_trt.profile.planning.placement import SIDES, Placement
from kvc_trt.validation import OwnSchema, read_mapping, validated

ASSUMPTIONS = (
    "a prediction, not a measurement: floors of prefill and steps, one after the other; kernels reach 75-90% of them",
    "callers ask again when they are answered; those beyond the rows that fit wait; time to first token is without it",
)
_Tokens = Annotated[int, Field(ge=1, le=2**31 - 1)]


class MixedRequest(OwnSchema):
    """One kind of request."""

    input: _Tokens
    """Tokens of the prompt."""
    output: _Tokens
    """Tokens of the answer."""
    weight: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """The frequency of this kind of request, relative to the others."""


class _MixFile(OwnSchema):
    concurrency: Annotated[int, Field(ge=1, le=1 << 20)]
    requests: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=10_000)]


@dataclass(frozen=True)
class Mix:
    """Kinds of requests, and the number of concurrent callers."""

    path: Path
    concurrency: int
    requests: tuple[MixedRequest, ...]

    @property
    def longest_input(self) -> int:
        """Tokens of the longest prompt."""
        return max(request.input for request in self.requests)

    @property
    def longest_output(self) -> int:
        """Tokens of the longest answer."""
        return max(request.output for request in self.requests)

    def check(self, max_input_len: int, max_output_len: int) -> None:
        """Raise InputError for a request that is too long for an engine of these lengths."""
        for number, request in enumerate(self.requests):
            for name, found, most, option in (
                ("input", request.input, max_input_len, "--max-input-len"),
                ("output", request.output, max_output_len, "--max-output-len"),
            ):
                if found > most:
                    raise InputError(
                        f"{self.path}: requests[{number}]: {name} is {found}; this engine takes at most {most} tokens",
                        hint=f"{option} {found}",
                    )


def read_mix(path: Path) -> Mix:
    """Read a mix from a YAML or JSON file; InputError for an invalid file.

    The file has `concurrency`, the number of callers, and `requests`, a list of mappings with `input` and `output` in
    tokens, and `weight` (default 1).
    """
    found = validated(_MixFile, read_mapping(path), str(path))
    requests = (
        validated(MixedRequest, request, f"{path}: requests[{number}]") for number, request in enumerate(found.requests)
    )
    return Mix(path, found.concurrency, tuple(requests))


def plan_mix(placement: Placement, mix: Mix, gpus: Sequence[Accelerator]) -> dict[str, Any]:
    """Return the predicted rates and seconds per request of each GPU that holds the engine, as plain data."""
    total = sum(request.weight for request in mix.requests)
    outputs = sum(request.weight * request.output for request in mix.requests) / total
    return {
        "concurrency": mix.concurrency,
        "requests": [request.model_dump() for request in mix.requests],
        "mean_input_tokens": sum(request.weight * request.input for request in mix.requests) / total,
        "mean_output_tokens": outputs,
        "gpus": [
            {"accelerator": gpu.name, **{side: _side(placement, side, gpu, mix, total, outputs) for side in SIDES}}
            for gpu in gpus
            if placement.holds(gpu)
        ],
        "assumptions": list(ASSUMPTIONS),
    }


def _side(
    placement: Placement, side: str, gpu: Accelerator, mix: Mix, total: float, outputs: float
) -> dict[str, Any] | None:
    """Return the rates of one side (of `SIDES`) on one GPU; None if not even one row fits."""
    rows = min(mix.concurrency, placement.rows_that_fit(side, gpu))
    if rows == 0:
        return None
    prefills = [placement.prefill_seconds(gpu, request.input) for request in mix.requests]
    prefill = sum(request.weight * seconds for request, seconds in zip(mix.requests, prefills, strict=True)) / total
    steps = [request.weight * (request.output - 1) for request in mix.requests]  # prefill gives the first token
    read = [placement.bytes_read(side, request.input, request.output // 2) for request in mix.requests]
    stepping = sum(steps)
    mean_read = sum(count * size for count, size in zip(steps, read, strict=True)) / stepping if stepping else 0.0
    step = placement.step_seconds(side, gpu, rows, mean_read)
    decode = stepping / total * step / rows
    each = prefill + decode
    return {
        "rows": rows,
        "requests_per_second": 1 / each,
        "tokens_per_second": outputs / each,
        "first_token_seconds": prefill,
        "step_ms": 1e3 * step,
        "share_of_time_in_prefill": prefill / each,
        "mean_seconds_per_request": mix.concurrency * each,
    }
