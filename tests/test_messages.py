"""An error is one line of bounded length in which a terminal finds nothing to obey, whatever it quotes."""

from __future__ import annotations

import pickle
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt import errors
from kvc_trt.errors import LONGEST_MESSAGE, InputError, KvcError, did_you_mean, escaped, one_line

STRANGE = st.text(st.one_of(st.characters(), st.sampled_from("\x1b\x9b\r\n\u202e\u2066\ud800\x00\u200b\u2028\x7f")))
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KvcError)]


def obeyed(text: str) -> list[str]:
    """Return the characters that a terminal would act on, or that stand where nothing is seen."""
    return [one for one in text if unicodedata.category(one) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")]


@pytest.mark.parametrize("kind", KINDS)
@given(message=STRANGE, hint=st.none() | STRANGE)
def test_message_and_hint_of_every_error_can_be_printed_anywhere(kind, message, hint):
    error = kind(message, hint=hint)
    assert obeyed(error.message) == obeyed(error.hint or "") == []
    assert str(error) == error.message
    error.message.encode()
    assert (pickle.loads(pickle.dumps(error)).message, error.hint is None) == (error.message, hint is None)


@given(STRANGE)
def test_escaping_keeps_printable_text_and_is_idempotent(text):
    assert escaped(escaped(text)) == escaped(text)
    if text.isprintable():
        assert escaped(text) == text
    assert escaped(text, keep="\n").split("\n") == [escaped(line) for line in text.split("\n")]


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("\x9b31m", r"\x9b31m"),
        ("two\nlines\tand\rmore", r"two\nlines\tand\rmore"),
        ("txt\u202egnp.exe", r"txt\u202egnp.exe"),
        ("\udcff", r"\udcff"),
        ("\U000e0041", r"\U000e0041"),
        ("größe 你好 ☃ C:\\new", "größe 你好 ☃ C:\\new"),
    ],
)
def test_each_kind_of_unprintable_character_is_escaped(text, seen):
    assert escaped(text) == seen


@pytest.mark.parametrize("filling", ["x", "\x1b", "é", "\U000e0041"])
def test_a_message_that_quotes_a_megabyte_is_cut_and_keeps_both_ends(filling):
    error = InputError(f"model.yaml: key '{filling * 1_000_000}' is unknown, expected one of a, b", hint=filling * 9999)
    assert len(error.message) <= LONGEST_MESSAGE
    assert len(error.hint) <= LONGEST_MESSAGE
    assert error.message.startswith("model.yaml: key '")
    assert error.message.endswith("is unknown, expected one of a, b")
    assert " [...] " in error.message


def test_a_message_of_the_longest_length_stays_whole():
    whole = "x" * LONGEST_MESSAGE
    assert one_line(whole) == whole
    assert len(one_line(whole + "x")) == LONGEST_MESSAGE


def test_an_error_about_an_error_stays_bounded():
    inner = InputError("x" * 5000)
    assert len(InputError(f"file: {inner.message}").message) == LONGEST_MESSAGE


def test_a_name_of_a_megabyte_gets_no_suggestion():
    """A search would take as much memory and time as a stranger likes."""
    long = "x" * (1 << 20)
    assert did_you_mean(long, [long]) == ""


def test_a_suggestion_is_part_of_the_message():
    assert obeyed(InputError("no such key" + did_you_mean("modul", ["mod\x1bul"])).message) == []
