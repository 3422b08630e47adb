"""The short form of `make fuzz`: all seeds, and as many specimens and spoiled inputs of every kind as are quick."""

from __future__ import annotations

import os

import pytest

from tests.fuzz.inputs import Inputs
from tests.fuzz.kind import kinds
from tests.fuzz.verdict import judge

MOST, SECONDS = 200, 0.4
"""Spoiled inputs of a kind, and processor time after which no more specimens, and then no more of them, are begun."""


def spent() -> float:
    """Processor time of this process and of those that it has waited for."""
    return sum(os.times()[:4])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", kinds())
def test_every_fuzzed_input_is_accepted_or_refused_cleanly(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzz-short" / name
    folder.mkdir(parents=True)
    kind = kinds()[name](folder)
    inputs, found = Inputs(kind, seed=1), set()
    if not inputs.valid:
        pytest.skip(str(kind.needs))
    for first, last in ((0, inputs.whole), (inputs.whole, inputs.whole + MOST)):
        began = spent()
        for number in range(first, last):
            if number >= inputs.valid and spent() - began > SECONDS:
                break
            verdict = judge(kind, inputs[number])
            assert verdict.kind != "bad", f"input {number}: {verdict.key}: {verdict.message}"
            assert verdict.kind == "accepted" or number >= inputs.valid, f"seed {number}: {verdict.message}"
            found.add(verdict.kind)
    assert found == {"accepted", "refused"}
