"""Pieces of memory for handoffs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.serving.dynamo.handoff.slots import HOLD_SECONDS, Slots


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_piece_is_free_again_once_it_is_read():
    slots = Slots(2, 8)
    first, second = slots.take(), slots.take()
    assert {first, second} == {0, 1}
    assert slots.take() is None
    slots.hold(first, "a")
    slots.give_back(second)
    slots.release(["nobody"])
    assert (slots.free, slots.held, slots.read) == (1, 1, 0)
    slots.release(["a", "a"])
    assert (slots.free, slots.held, slots.read, slots.expired) == (2, 0, 1, 0)
    assert slots.all_free


def test_a_piece_that_nobody_reads_is_free_again_after_a_time():
    clock = Clock()
    slots = Slots(1, 8, clock)
    slots.hold(slots.take(), "a")
    clock.now = HOLD_SECONDS
    slots.release([])
    assert slots.held == 1
    clock.now += 0.1
    slots.release([])
    assert (slots.free, slots.expired) == (1, 1)
    slots.release(["a"])  # its reader was too late
    assert slots.free == 1


def test_pieces_stay_where_they_are():
    slots = Slots(3, 8)
    addresses = [slots.address(slot) for slot in range(3)]
    slots.bytes_of(1)[:] = 7
    assert slots.arena.tolist() == [[0] * 8, [7] * 8, [0] * 8]
    assert addresses == [slots.arena.ctypes.data + 8 * slot for slot in range(3)]


@given(st.lists(st.sampled_from(["take", "hold", "give back", "read", "late"])))
def test_no_piece_is_lost_and_none_is_used_twice(steps):
    clock = Clock()
    slots, used, tags = Slots(3, 4, clock), [], []
    for number, step in enumerate(steps):
        if step == "take":
            slot = slots.take()
            used += [] if slot is None else [slot]
        elif step == "late":
            clock.now += HOLD_SECONDS + 1
            slots.release([])
            tags.clear()
        elif step == "read" and tags:
            slots.release([tags.pop(0)])
        elif used and step == "hold":
            slots.hold(used.pop(), str(number))
            tags.append(str(number))
        elif used and step == "give back":
            slots.give_back(used.pop())
        assert len(used) + slots.held + slots.free == 3
        assert len(set(used)) == len(used)
