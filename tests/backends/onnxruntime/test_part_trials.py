"""The inputs on which the parts of a prefill are tried."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvc_trt.backends.onnxruntime.prefill.part_trials import FEW_TOKENS, MANY_TOKENS, Trials
from kvc_trt.graph.prefill_parts import LENGTHS
from kvc_trt.operators import PROMPT_BLOCK


class Store:
    """A part that reads nothing but the prompt's length, and records it."""

    def __init__(self):
        self.session = object()
        self.part = SimpleNamespace(inputs=(LENGTHS,), up_to_block=())
        self.lengths = set()

    def run(self, inputs, *, shrink):
        (length,) = inputs[LENGTHS].tolist()
        self.lengths.add(length)


@pytest.mark.parametrize(
    ("budget", "longest", "expected"),
    [
        (0, 4096, {FEW_TOKENS, MANY_TOKENS}),
        (1000, 100_000, {8 * PROMPT_BLOCK + FEW_TOKENS, 16 * PROMPT_BLOCK + MANY_TOKENS}),
        (1000, 1100, {1100}),
    ],
    ids=["keeps everything", "evicts", "evicts little"],
)
def test_a_store_is_tried_on_prompts_of_which_it_evicts(budget, longest, expected):
    store = Store()
    Trials(budget, longest).store_rates(store)
    assert store.lengths == expected
    assert all(length > budget for length in store.lengths)
