from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.runtime.sampling.text import StopStrings

TEXT = st.text("ab", max_size=20)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def first_match(text, stops):
    """Return the place of the first match when the text is read one character at a time; None without a match."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


@given(TEXT, STOPS, st.data())
def test_stop_strings_are_found_however_the_text_is_cut(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    matcher = StopStrings(stops)
    shown, stopped = "", False
    for piece in pieces:
        new, stopped = matcher.push(piece)
        shown += new
        if stopped:
            break
    shown += matcher.flush()
    expected = first_match(text, stops)
    assert stopped == (expected is not None)
    assert shown == (text if expected is None else text[:expected])


@given(TEXT, STOPS)
def test_only_what_may_become_a_stop_string_is_held_back(text, stops):
    matcher = StopStrings(stops)
    shown, stopped = matcher.push(text)
    if not stopped:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_without_stop_strings_nothing_is_held_back():
    assert StopStrings(()).push("abc") == ("abc", False)


def test_the_stop_string_is_not_shown():
    matcher = StopStrings(["\n\n", "END"])
    assert matcher.push("one\n") == ("one", False)
    assert matcher.push("two E") == ("\ntwo ", False)
    assert matcher.push("NDless") == ("", True)
    assert matcher.flush() == ""
