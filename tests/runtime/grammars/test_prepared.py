"""Masks that are computed on another thread while a step runs: the same masks, one for each token, and no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from concurrent.futures import Future

import numpy as np
import pytest

from kvc_trt.runtime import Speculation
from kvc_trt.runtime.grammar import matcher as module
from kvc_trt.runtime.grammar.compiler import Grammars
from kvc_trt.runtime.session import drafting
from tests.runtime.fake_drafts import FakeDraftExecutor
from tests.runtime.fake_executor import FakeExecutor
from tests.runtime.grammars.byte_tokenizer import END
from tests.runtime.grammars.test_answers import GRAMMARS, LONGEST, TOKENIZER, VOCABULARY, Always, asked, session

COMPILED = Grammars(TOKENIZER, VOCABULARY)


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
@pytest.mark.parametrize("seed", range(3))
def test_masks_are_the_same_whatever_is_asked_meanwhile(grammar, seed):
    generator = np.random.default_rng(seed)
    plain, prepared = (COMPILED.matcher(grammar, [END], "row 0") for _ in range(2))
    for _ in range(40):
        if generator.random() < 0.8:
            prepared.prepare()
        kind = generator.integers(6)
        if kind == 0:
            assert prepared.forced() == plain.forced()
        elif kind == 1:
            assert prepared.is_complete == plain.is_complete
        elif kind == 2:
            tokens = generator.integers(0, VOCABULARY - 3, 4).tolist()
            assert prepared.prefix(tokens) == plain.prefix(tokens)
        elif kind == 3:
            prepared = prepared.copy()
        allowed = plain.allowed()
        np.testing.assert_array_equal(prepared.allowed(), allowed)
        token = int(generator.choice(np.flatnonzero(allowed)))
        if token == END or plain.is_complete:
            plain.begin_answer()
            prepared.begin_answer()
        else:
            plain.advance(token)
            if generator.random() < 0.5:
                prepared.prepare()
            prepared.advance(token)
        if plain.is_complete:
            plain.begin_answer()
            prepared.begin_answer()


def test_a_process_that_forks_gets_masks_on_threads_of_its_own():
    """Both masks that were begun before the fork and masks that the child begins, also where another fork follows."""
    subprocess.run([sys.executable, "-m", __spec__.name], check=True, timeout=60)


class Noted:
    """In place of the threads: computes at once, and notes that it did."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def submit(self, made):
        self.log.append("mask")
        found: Future = Future()
        found.set_result(made())
        return found


@pytest.fixture
def log(monkeypatch):
    noted = Noted()
    monkeypatch.setattr(module, "_BESIDE", noted)
    return noted.log


def test_a_mask_begins_before_the_step_whose_token_it_is_for(log, monkeypatch):
    decode = FakeExecutor.decode

    def noted(self, *given):
        log.append("step")
        return decode(self, *given)

    monkeypatch.setattr(FakeExecutor, "decode", noted)
    [output] = session().generate([asked(GRAMMARS[0])])
    assert output.finish_reason == "stop"
    assert log == ["mask", "step"] * (len(output.token_ids) - 1)


def test_rows_without_a_grammar_prepare_nothing(log):
    session(2).generate([asked(None, max_new_tokens=5), asked(None, (7,), max_new_tokens=3)])
    assert log == []


def test_passes_over_drafts_prepare_one_mask_for_a_row(log, monkeypatch):
    monkeypatch.setattr(drafting, "Payoff", Always)
    made = session(executor=FakeDraftExecutor, speculation=Speculation(), breaks=range(LONGEST))
    [output] = made.generate([asked(GRAMMARS[0])])
    assert output.finish_reason == "stop"
    assert made.timings.draft_runs
    assert len(log) == made.timings.decode_runs


def _fork_twice() -> None:
    """Fork beside computed masks; every process takes the mask that it was forked with, and ten more."""
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later warn of what is tried here
    plain, prepared = (COMPILED.matcher(GRAMMARS[0], [END], "row 0") for _ in range(2))
    children = 0
    for _ in range(2):
        prepared.prepare()
        children, parent = children + 1, os.fork()
        if not parent:
            children = 0
    signal.alarm(50)  # whoever hangs ends, and nobody waits for them
    for _ in range(10):
        allowed = plain.allowed()
        np.testing.assert_array_equal(prepared.allowed(), allowed)
        token = int(np.flatnonzero(allowed)[0])
        if token == END:
            break
        for one in (plain, prepared):
            one.advance(token)
        prepared.prepare()
    for _ in range(children):
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0


if __name__ == "__main__":
    _fork_twice()
