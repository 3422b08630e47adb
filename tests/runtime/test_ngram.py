from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.runtime.speculation.ngram import LONGEST, SHORTEST, WEIGHT, NgramText

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def expected_draft(text: list[int], count: int) -> list[int]:
    """Return the rule, token by token: the latest of the places that repeat the most of the text's end."""
    best, start = SHORTEST - 1, None
    for end in range(1, len(text)):
        repeated = 0
        while repeated < min(LONGEST, end) and text[end - 1 - repeated] == text[-1 - repeated]:
            repeated += 1
        if repeated >= SHORTEST and repeated >= best:
            best, start = repeated, end
    if start is None:
        return []
    found = list(text)
    for place in range(start, start + count):
        found.append(found[place])
    return found[len(text) :]


@given(TEXTS, st.lists(st.integers(0, 3), max_size=4), st.integers(1, 8))
def test_a_draft_is_what_followed_before(read: list[int], unfed: list[int], count: int) -> None:
    text = NgramText()
    text.read(read[:5])
    for token in read[5:]:
        text.feed(token)
    assert text.draft(unfed, count) == expected_draft([*read, *unfed], count)


def test_a_text_that_does_not_repeat_has_no_draft():
    text = NgramText()
    text.read(list(range(2000)))
    assert text.draft([2000], 4) == []
    assert text.draft([7], 4) == []
    assert text.draft([7, 8], 4) == [9, 10, 11, 12]


def test_the_table_grows_with_the_text():
    text = NgramText()
    for first in range(0, 5000, 100):
        text.read(list(range(first, first + 100)))
    assert text.draft([4321, 4322], 3) == [4323, 4324, 4325]


def test_the_expected_number_follows_what_came():
    text = NgramText()
    text.watch([1], [2, 3, 4])
    for token in (1, 2, 3):
        text.feed(token)
    assert text.expected == 0  # the last of them is still to come
    text.feed(4)
    assert text.expected == 3 * WEIGHT
    text.watch([9], [2, 3, 4])
    text.watch([5], [6])  # one at a time
    for token in (9, 2, 7):
        text.feed(token)
    after_one = 3 * WEIGHT + WEIGHT * (1 - 3 * WEIGHT)
    assert text.expected == after_one
    text.watch([1], [2])
    text.read([8])  # what was given is no answer to a draft
    text.feed(1)
    assert text.expected == after_one
