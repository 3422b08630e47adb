"""Contexts between engines that take turns and engines that take none, of the same weights and settings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvc_trt.contexts import RowPacking, read_context, write_context
from kvc_trt.contexts.packing import _state_digest
from kvc_trt.engine.program import NO_FILE, Program
from kvc_trt.errors import InputError
from kvc_trt.graph.state import state_tensors
from kvc_trt.runtime.session.context_store import ContextStore
from tests.contexts.conftest import FINGERPRINT, random_context
from tests.every_policy import EVERY, parameters_of
from tests.small_model import SMALL

KEEP_PLACES = {
    "rocketkv", "rocketkv-v1", "rocketkv-v2", "expected-attention-hybrid", "snapkv", "snapkv-gqa",
    "expected-attention", "keydiff", "pyramidkv", "snapkv++",
}  # fmt: skip
"""Policies that compact after a turn and therefore need the positions of their slots in the text."""


def packing_of(policy: str, turns: bool) -> RowPacking:
    parameters = parameters_of(policy)
    state = state_tensors(SMALL, parameters, "float32", turns=turns)
    program = Program(SMALL, parameters, state, NO_FILE, NO_FILE, NO_FILE, NO_FILE if turns else None)
    return RowPacking(program, replace(FINGERPRINT, state=_state_digest(state)))


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("turns", [True, False], ids=["of-turns", "without-turns"])
def test_a_context_fits_engines_with_and_without_turns_if_tensors_agree(policy, turns, tmp_path):
    mine, other = packing_of(policy, turns), packing_of(policy, not turns)
    context = random_context(mine, 200, 0)
    write_context(tmp_path / "context", context)
    if policy not in KEEP_PLACES:
        found = read_context(tmp_path / "context", other)
        assert {name: array.tobytes() for name, array in found.tensors.items()} == {
            name: array.tobytes() for name, array in context.tensors.items()
        }
        return
    reason = "by an engine that takes turns, and this one takes none" if turns else "by an engine that takes no turns"
    with pytest.raises(InputError, match=reason) as caught:
        read_context(tmp_path / "context", other)
    assert ("kvc-trt build" if turns else "kvc-trt context save") in caught.value.hint
    store = ContextStore(other, 1 << 30, other.limits, turns=not turns)
    with pytest.raises(InputError, match=reason):
        store.share(context)


def test_another_difference_has_its_own_reason(tmp_path):
    mine, other = packing_of("rocketkv", True), packing_of("rocketkv", False)
    for name, reason in (("weights", "other weights"), ("parameters", "with other numbers"), ("state", "other state")):
        made_by = replace(mine.fingerprint, **{name: "f" * 64})
        with pytest.raises(InputError, match=reason):
            made_by.check_same(other.fingerprint, "it", other.other_turns)
