"""Passes are allowed only where they cannot cost much, and are tried again where they would save time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.runtime.speculation.payoff import LENT, SHARE, Payoff


def run(balance: Payoff, accepted: list[int], cost: float, expected: list[float], rows: int = 1) -> tuple[float, int]:
    """Answer with passes of `cost` steps' time where they seem to pay: (time, tokens of each row)."""
    seconds, tokens = 0.0, 0
    for count, promised in zip(accepted, expected, strict=True):
        if balance.affords() and balance.pays(rows, promised):
            balance.passed(rows, cost)
            balance.accepted(rows, count * rows)
            seconds, tokens = seconds + cost, tokens + 1 + count
        else:
            balance.stepped(rows, 1.0)
            seconds, tokens = seconds + 1.0, tokens + 1
    return seconds, tokens


@given(st.data(), st.floats(0.9, 6), st.integers(1, 3))
def test_the_loss_is_bounded_whatever_drafts_promise(data, cost: float, rows: int) -> None:
    size = data.draw(st.integers(1, 400))
    accepted = data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    expected = data.draw(st.lists(st.floats(0, 4), min_size=size, max_size=size))
    seconds, tokens = run(Payoff(), accepted, cost, expected, rows)
    assert seconds <= tokens * (1 + SHARE) + LENT + cost


def test_drafts_that_are_never_accepted_are_no_longer_tried() -> None:
    seconds, tokens = run(Payoff(), [0] * 1000, 1.5, [0.1] * 1000)
    assert seconds == tokens


def test_accepted_drafts_are_used_again_after_a_long_pause() -> None:
    balance = Payoff()
    for _ in range(3):
        seconds, tokens = run(balance, [4] * 100, 1.5, [4.0] * 100)
        assert seconds < tokens * 0.35
        run(balance, [0] * 500, 1.5, [0.0] * 500)


def test_a_pass_that_seemed_too_slow_is_tried_again() -> None:
    balance = Payoff()
    balance.stepped(1, 1.0)
    balance.passed(1, 9.0)  # disturbed
    assert not balance.pays(1, 4.0)
    for _ in range(700):
        balance.stepped(1, 1.0)
    assert balance.pays(1, 4.0)
    balance.passed(1, 1.5)
    assert balance.pays(1, 4.0)


def test_no_draft_is_tried_before_the_first_step() -> None:
    balance = Payoff()
    assert not balance.affords()
    assert not balance.pays(1, 4.0)


def test_time_spent_looking_for_drafts_counts_against_the_balance() -> None:
    balance = Payoff()
    balance.stepped(1, 1.0)
    balance.spent(1, 3.0)
    assert not balance.affords()
