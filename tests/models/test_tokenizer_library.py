from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from kvc_trt.errors import InputError
from kvc_trt.models.sources import tokenizer_library
from kvc_trt.models.sources.tokenizer import read_tokenizer
from kvc_trt.models.sources.tokenizer_library import Tokenizer
from tests.models.hostile_tokenizers import PANICS, tokenizer_file


def untried(content, monkeypatch):
    """One that is not tried when it is loaded, so that it fails in use."""
    monkeypatch.setattr(Tokenizer, "_try", lambda self, tokens: None)
    return Tokenizer(content, "a/tokenizer.json")


@given(st.text("ab \n<s>é", max_size=30), st.booleans())
@settings(deadline=None)
def test_a_good_file_means_what_the_library_says(text, adds):
    own, library = Tokenizer(tokenizer_file(), "file"), Library.from_buffer(tokenizer_file())
    ids = library.encode(text, add_special_tokens=adds).ids
    assert own.encode(text, add_special_tokens=adds).ids == ids
    for skips in (True, False):
        assert own.decode(ids, skip_special_tokens=skips) == library.decode(ids, skip_special_tokens=skips)
    assert own.get_vocab() == library.get_vocab(with_added_tokens=True)
    assert [own.id_to_token(token) for token in range(5)] == [library.id_to_token(token) for token in range(5)]


@pytest.mark.parametrize("name", PANICS)
def test_a_file_that_panics_is_refused_when_it_is_loaded_without_a_word_on_stderr(name, tmp_path, capfd):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(PANICS[name])
    with pytest.raises(InputError, match=r"tokenizer\.json is not a tokenizer: ") as caught:
        read_tokenizer(path)
    assert len(caught.value.message.splitlines()) == 1
    assert capfd.readouterr().err == ""


def test_stderr_is_left_as_it_was(capfd):
    Tokenizer(tokenizer_file(), "file")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


def test_output_of_other_threads_to_stderr_is_shown_after_loading(capfd, monkeypatch):
    monkeypatch.setattr(Tokenizer, "_try", lambda self, tokens: os.write(2, b"another thread\n"))
    Tokenizer(tokenizer_file(), "file")
    assert capfd.readouterr().err == "another thread\n"


def test_a_tokenizer_loads_with_a_closed_stderr():
    code = (
        "import os, sys; os.close(2)\n"
        "from kvc_trt.models.sources.tokenizer_library import Tokenizer\n"
        "print(Tokenizer(sys.stdin.buffer.read(), 'file').encode('ab').ids)"
    )
    done = subprocess.run([sys.executable, "-c", code], input=tokenizer_file(), stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"[3, 2]\n"


def test_a_panic_in_use_is_one_error_that_names_the_file(monkeypatch):
    encoding, decoding = (untried(PANICS[name], monkeypatch) for name in [*PANICS][1:])
    with pytest.raises(InputError, match=r"^tokenizer\.json: the tokenizer cannot read this text: no entry found"):
        encoding.encode("ab")
    with pytest.raises(InputError, match=r"^tokenizer\.json: the tokenizer cannot write these tokens as text: "):
        decoding.decode([3])


def test_other_threads_go_on_while_a_long_text_is_encoded():
    """No thread is made to let go of Python's lock, so the other one runs only where the library lets go of it."""
    tokenizer, library = Tokenizer(tokenizer_file(), "file"), Library.from_buffer(tokenizer_file())
    text, interval, over, turns = "ab " * 100_000, sys.getswitchinterval(), threading.Event(), 0

    def count() -> None:
        nonlocal turns
        while not over.wait(0.001):
            turns += 1

    counting = threading.Thread(target=count)
    sys.setswitchinterval(1000)
    try:
        counting.start()
        before = turns
        encoded = tokenizer.encode(text)
        after = turns
    finally:
        sys.setswitchinterval(interval)
        over.set()
        counting.join()
    assert after > before
    assert encoded.ids == library.encode(text).ids


def test_a_text_that_a_small_vocabulary_cannot_spell_is_refused_when_it_comes():
    words = {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"a": 0}}
    tokenizer = Tokenizer(tokenizer_file(model=words), "a/tokenizer.json")
    with pytest.raises(InputError, match=r"^tokenizer\.json: .* this text: WordLevel error: Missing \[UNK\]"):
        tokenizer.encode("zzz", add_special_tokens=False)


def test_text_with_half_of_a_character_is_refused():
    with pytest.raises(InputError, match="half of a character"):
        Tokenizer(tokenizer_file(), "file").encode("a\udcff")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), TypeError("ours")])
def test_an_error_that_is_not_the_librarys_passes(error, monkeypatch):
    tokenizer = Tokenizer(tokenizer_file(), "file")

    class Failing:
        def decode(self, ids, skip_special_tokens):
            raise error

    monkeypatch.setattr(tokenizer, "_library", Failing())
    with pytest.raises(type(error)):
        tokenizer.decode([0])


def test_a_token_far_behind_the_others_costs_no_time():
    words = {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, "b": 2**31}}
    started = time.monotonic()
    assert '"b": 2147483648' in Tokenizer(tokenizer_file(model=words), "file").to_str()
    assert time.monotonic() - started < 60


def test_an_empty_vocabulary_is_refused():
    empty = {"type": "WordLevel", "unk_token": "a", "vocab": {}}
    with pytest.raises(InputError, match="file has an empty vocabulary"):
        Tokenizer(tokenizer_file(model=empty, added_tokens=[], post_processor=None), "file")


def test_only_one_module_uses_the_library():
    """Another user of it would meet its panics."""
    package = tokenizer_library.__file__.rpartition("models")[0]
    found = subprocess.run(
        ["grep", "-rlE", r"^\s*(from tokenizers import|import tokenizers)", package, "--include=*.py"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert [path.removeprefix(package) for path in found.stdout.split()] == ["models/sources/tokenizer_library.py"]
