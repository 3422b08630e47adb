"""The library that reads tokenizer.json, in bounds: every failure of it is one InputError that names the file.

A tokenizer.json is a stranger's. The library is written in Rust, and a file can make it panic, when it is loaded or
later, at some text: a `BaseException` that no `except Exception` catches, and lines on stderr. `Tokenizer` is the only
user of the library in this package.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from kvc_trt.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Encoding

_TRIED_TEXTS = ("", "a", " a b\n", "The key is 12-34, he said.\t\u00e9 \u2603 \u4f60\u597d", "x" * 300)
_TRIED_TOKENS = 64
"""The number of added tokens, and of tokens at each end of the vocabulary, on which a file is tried one by one when it
is loaded."""
_LONG_TEXT = 1 << 14
"""Characters, encoded in about 10 ms."""


class Tokenizer:
    """A tokenizer.json, as `tokenizers.Tokenizer` reads it.

    A prompt is encoded whole: the file's settings of truncation and padding were meant for training.
    """

    def __init__(self, content: bytes, source: str) -> None:
        """Load a file's content and try it; `source` names it. InputError for a file that the library does not take."""
        from tokenizers import Tokenizer as Library

        self._content = content
        # An error in use may reach a client, who needs no path of this machine.
        self._name = PurePath(source).name
        with _failures_named(f"{source} is not a tokenizer", at_loading=True), _panics_off_stderr():
            self._library = Library.from_buffer(content)
            self._library.no_truncation()
            self._library.no_padding()
            tokens = self.get_vocab().values()
            self._try(tokens)
        if not tokens:
            raise InputError(f"{source} has an empty vocabulary")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Encoding:
        """Return the tokens of a text: `ids`, and for each its `offsets` in the text.

        Other threads go on while a long text is encoded.
        """
        with _failures_named(f"{self._name}: the tokenizer cannot read this text"):
            try:
                if isinstance(text, str) and len(text) > _LONG_TEXT:
                    # The library holds Python's lock while it encodes one text, and lets go of it for a list of texts.
                    return self._library.encode_batch([text], add_special_tokens=add_special_tokens)[0]
                return self._library.encode(text, add_special_tokens=add_special_tokens)
            except TypeError as error:
                if isinstance(text, str):  # how the library refuses a text that UTF-8 cannot write
                    raise InputError("the text holds half of a character (a lone surrogate)") from error
                raise

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of these tokens; of ids that are no tokens, nothing."""
        with _failures_named(f"{self._name}: the tokenizer cannot write these tokens as text"):
            return str(self._library.decode(ids, skip_special_tokens=skip_special_tokens))

    def get_vocab(self, *, with_added_tokens: bool = True) -> dict[str, int]:
        """Return every token and its id."""
        found: dict[str, int] = self._library.get_vocab(with_added_tokens=with_added_tokens)
        return found

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        """Return the tokens that the file adds to its vocabulary, by id; each is `special` or not."""
        found: dict[int, Any] = self._library.get_added_tokens_decoder()
        return found

    def id_to_token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary writes it; None for an id that is no token."""
        found: str | None = self._library.id_to_token(token_id)
        return found

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary; None for another text."""
        found: int | None = self._library.token_to_id(token)
        return found

    def unknown_words(self, text: str) -> list[str]:
        """Return the pieces of a text that become the unknown token, each once; of some vocabularies nothing does."""
        unknown = self.token_to_id(getattr(self._library.model, "unk_token", None) or "")
        if unknown is None:
            return []
        encoding = self.encode(text)
        places = (offsets for token, offsets in zip(encoding.ids, encoding.offsets, strict=True) if token == unknown)
        return list(dict.fromkeys(text[first:last] for first, last in places))

    def to_str(self) -> str:
        """Return the text of the file. The library's own version counts up to the largest id, which takes minutes."""
        return self._content.decode()

    def _try(self, tokens: Collection[int]) -> None:
        """Encode and decode a little of everything: a file that panics at it is not a tokenizer.

        An ordinary error is none here: a small vocabulary need not spell every text.
        """
        ends, added = sorted(tokens), [*self.get_added_tokens_decoder()]
        alone = [*added[:_TRIED_TOKENS], *ends[:_TRIED_TOKENS], *ends[-_TRIED_TOKENS:]]
        for skips in (True, False):
            for ids in ([*tokens], *([token] for token in alone)):
                with contextlib.suppress(Exception):
                    self._library.decode(ids, skip_special_tokens=skips)
            for text in _TRIED_TEXTS:
                with contextlib.suppress(Exception):
                    self._library.encode(text, add_special_tokens=not skips)


@contextlib.contextmanager
def _failures_named(what: str, *, at_loading: bool = False) -> Iterator[None]:
    """Raise an InputError, which opens with `what`, for a failure of the library: a plain `Exception` or a panic.

    `at_loading` any exception is one.
    """
    try:
        yield
    except InputError:
        raise
    except BaseException as error:
        if not (_is_panic(error) or type(error) is Exception or (at_loading and isinstance(error, Exception))):
            raise
        raise InputError(f"{what}: {' '.join(str(error).split())}") from error


def _is_panic(error: BaseException) -> bool:
    """Return whether this is a panic of a Rust library. Its class is no `Exception` and cannot be imported."""
    return type(error).__name__ == "PanicException" and not isinstance(error, Exception)


_STDERR = 2
_DIVERTED = threading.Lock()


@contextlib.contextmanager
def _panics_off_stderr() -> Iterator[None]:
    """Divert file descriptor 2; a panic's lines are dropped, and all other output is shown later."""
    with _DIVERTED, contextlib.ExitStack() as undo:
        try:
            stderr = undo.enter_context(os.fdopen(os.dup(_STDERR), "wb"))
            diverted = undo.enter_context(os.fdopen(os.memfd_create("stderr"), "w+b"))  # no disk can be full
            os.dup2(diverted.fileno(), _STDERR)
        except OSError:  # stderr is closed, or there is nowhere to divert it to
            yield
            return
        panicked = False
        try:
            yield
        except BaseException as error:
            panicked = _is_panic(error)
            raise
        finally:
            os.dup2(stderr.fileno(), _STDERR)
            if not panicked:
                diverted.seek(0)
                shutil.copyfileobj(diverted, stderr)
