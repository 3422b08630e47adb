"""The reference takes the number of threads with which it is faster, and leaves PyTorch's own as it was."""

from __future__ import annotations

import pytest
import torch

from kvc_trt.reference.model import threads
from kvc_trt.reference.model.threads import torch_threads


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("most", "seconds", "expected"),
    [
        (None, {3: 1.0, 1: 2.0}, 3),
        (None, {3: 2.0, 1: 1.0}, 1),
        (2, {2: 1.0, 1: 2.0}, 2),
        (2, {2: 2.0, 1: 1.0}, 1),
        (1, {}, 1),
    ],
)
def test_the_faster_number_of_threads_is_chosen(monkeypatch, most, seconds, expected):
    monkeypatch.setattr(threads, "_trial_seconds", seconds.__getitem__)
    with torch_threads(most):
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == 3


def test_a_failure_leaves_the_number_as_it_was(monkeypatch):
    monkeypatch.setattr(threads, "_trial_seconds", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError), torch_threads(2):
        pass
    assert torch.get_num_threads() == 3


def test_trials_take_time_with_the_number_that_they_are_for():
    assert threads._trial_seconds(2) > 0
    assert torch.get_num_threads() == 2
