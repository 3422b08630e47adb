"""Grammars compiled for one tokenizer, by llguidance.

The library is given limits for everything it builds and computes, so a hostile grammar fails in a fraction of a second.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kvc_trt.errors import Busy, InputError
from kvc_trt.runtime.grammar.grammar import Grammar
from kvc_trt.runtime.grammar.matcher import Matcher, reason_of
from kvc_trt.runtime.grammar.schema import schemas_in
from kvc_trt.runtime.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from kvc_trt.models.sources.tokenizer_library import Tokenizer

_MOST_KEPT = 64
"""The number of compiled grammars that are kept; beyond it, the least recently used is dropped."""
_WHITESPACE = r" |\n[ \t]{0,32}"
"""White space between JSON tokens: one space, or a new line and its indentation. With more, a model could write white
space forever."""
_CHARACTERS_TRIED = 1 << 20
"""The total characters of inner schemas that are compiled alone to find the one that is wrong."""
_TRIED = 4
"""The length in tokens of the answer that `_try` writes by each newly compiled grammar."""
_NOTHING_FOLLOWS = "NoExtensionBias"
"""llguidance's reason for a state that no token leads out of."""
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")
"""The characters that a regular expression needs escaped."""
_ASCII = "".join(map(chr, range(0x20, 0x7F)))
_OF_STRING, _OF_NAME = r'[^"\\\x00-\x1F\x7F]', "[a-zA-Z0-9]"
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_OF_NAME}{{1,{most}}}" for most in (2, 4, 6, 8, 12, 30)),
    *(f"{_OF_STRING}{{1,{most}}}" for most in (2, 4, 6, 8, 10, 15, 20, 30)),
    f"{_OF_STRING}+",
]
"""Regular expressions that divide the vocabulary into slices; a token belongs to the first one that matches it whole.

Where the grammar allows a slice's expression, a mask admits all its tokens at once; other tokens are tried one by one.
The library's own slices are string characters: at most 10, at most 30, or any number. With these alone, half of the
vocabulary is tried one by one in a string that has room for 25 more characters, in names, and in the first part of an
e-mail address. The allowed tokens are the same with any slices.
"""
_STACK, _STACK_OF_CHARACTER = 16 << 20, 4 << 10
"""Bytes of the stack that a grammar is compiled on: a constant, and an addition for each character of the grammar.

The library recurses for each nested rule, schema or reference, and a stack overflow ends the process; the worst
grammars that we tried took 1 KiB a character. Unused stack takes no memory.
"""
_starting = threading.Lock()
"""Lock held while threads start with a non-default stack size."""


class Grammars:
    """Compiles grammars for the tokenizer of a model with `vocab_size` logits. Methods may be called by any thread."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._compiling = threading.Lock()

    def check(self, grammar: Grammar, what: str) -> None:
        """Compile a grammar; InputError, beginning with `what`, for one that this model's answers cannot follow."""
        self._matcher(grammar, what)

    def matcher(self, grammar: Grammar, ends: Collection[int], what: str) -> Matcher:
        """Return the matcher of a new answer that `ends` [token ids] end; the same InputErrors as `check`."""
        state = self._matcher(grammar, what).deep_copy()
        return Matcher(state, self._vocab_size, ends, self._vocabulary[0].special, what)

    def _matcher(self, grammar: Grammar, what: str) -> LLMatcher:
        if (found := self._kept(grammar)) is not None:  # a known grammar does not wait for others to compile
            return found
        with self._compiling:
            if (found := self._kept(grammar)) is not None:
                return found
            try:
                found = _on_deep_stack(lambda: self._compile(grammar), len(grammar.text))
            except InputError as error:
                raise InputError(f"{what}: {error.message}", hint=error.hint) from error
        with self._lock:
            self._compiled[grammar] = found
            while len(self._compiled) > _MOST_KEPT:
                self._compiled.popitem(last=False)
        return found

    def _kept(self, grammar: Grammar) -> LLMatcher | None:
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
            return found

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        vocabulary, library = self._vocabulary
        if grammar.is_json and (missing := vocabulary.missing(_ASCII)):
            raise InputError(
                f"{grammar.name}: the tokenizer has no token for {missing[0]!r}, so it cannot write JSON",
                hint="take a model with a byte-level or a SentencePiece tokenizer, as nearly all chat models have",
            )
        try:
            found = LLMatcher(library, _source(grammar), log_level=0, limits=_limits())
        except ValueError as error:
            raise InputError(f"{grammar.name} cannot be compiled: {error}") from error
        if found.is_error():
            raise InputError(
                f"{grammar.name} cannot be compiled{_place_of_error(grammar, library)}: {reason_of(found)}"
            )
        self._try(found, grammar)
        return found

    def _try(self, found: LLMatcher, grammar: Grammar) -> None:
        """Refuse a grammar that allows no first token, or whose first tokens already exceed the library's limits.

        Computing the first mask here also builds the state that every answer needs.
        """
        state = found
        for count in range(_TRIED):
            bits = np.frombuffer(state.compute_bitmask(), np.uint8)
            if state.is_error() and reason_of(state) != _NOTHING_FOLLOWS:
                raise InputError(f"{grammar.name} is too complex: {reason_of(state)}")
            allowed = np.flatnonzero(np.unpackbits(bits, count=self._vocab_size, bitorder="little"))
            if not len(allowed):
                if count == 0:
                    raise InputError(f"{grammar.name} lets an answer begin with no token of the tokenizer")
                return
            state = state if count else found.deep_copy()
            state.consume_token(int(allowed[len(allowed) // 2]))

    @cached_property
    def _vocabulary(self) -> tuple[Vocabulary, LLTokenizer]:
        from llguidance import LLTokenizer, TokenizerWrapper

        if self._tokenizer is None:
            raise InputError("a grammar needs a tokenizer, and this engine has none")
        vocabulary = Vocabulary(self._tokenizer, self._vocab_size)
        wrapped = TokenizerWrapper(_Tokens(vocabulary))
        size, end = self._vocab_size + 1, self._vocab_size
        return vocabulary, LLTokenizer(wrapped, n_vocab=size, eos_token=end, slices=_SLICES)


class _Tokens:
    """A vocabulary in the form that llguidance takes, with one token more, which stands for all the model's end tokens.

    Where a grammar forces a text, llguidance allows only the tokens that `__call__` returns for it.
    """

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = [*vocabulary.tokens, b"<end>"]
        self.eos_token_id = len(vocabulary.tokens)
        self.special_token_ids = [*vocabulary.special, self.eos_token_id]
        self._vocabulary = vocabulary

    def __call__(self, text: str) -> list[int]:
        return self._vocabulary.encode(text)


def _on_deep_stack(compiled: Callable[[], LLMatcher], characters: int) -> LLMatcher:
    """Call `compiled`, which compiles a grammar of `characters` characters, on a thread with a deep enough stack."""
    with ThreadPoolExecutor(1, "kvc-trt grammar") as thread:
        with _starting:
            usual = threading.stack_size(_STACK + _STACK_OF_CHARACTER * characters)
            try:
                found = thread.submit(compiled)
            except RuntimeError as error:
                raise Busy("there is no memory to compile a grammar now") from error
            finally:
                threading.stack_size(usual)
        return found.result()


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=10_000,
        max_grammar_size=30_000,
        verbose_errors=False,
    )


def _source(grammar: Grammar) -> str:
    """Return the text of a grammar in llguidance's format."""
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    if grammar.kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(_SPECIAL.sub(r"\\\g<0>", one) for one in grammar.choices()))
    schema = {"type": "object"} if grammar.kind == "json_object" else json.loads(grammar.text)
    return _source_of_schema({} if schema is True else schema)


def _source_of_schema(schema: Any) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": _WHITESPACE})


def _place_of_error(grammar: Grammar, library: LLTokenizer) -> str:
    """Return " at " and the pointer of the innermost schema that fails to compile alone; empty if there is none."""
    from llguidance import LLMatcher

    if grammar.kind != "json_schema":
        return ""
    whole = json.loads(grammar.text)
    shared = {name: whole[name] for name in ("$defs", "definitions") if isinstance(whole, dict) and name in whole}
    found, left = "", _CHARACTERS_TRIED
    for pointer, schema in schemas_in(whole):
        if pointer == "#" or (found and not pointer.startswith(f"{found}/")):
            continue
        if isinstance(schema, bool):
            continue
        alone = _source_of_schema({**shared, **schema})
        left -= len(alone)
        if left < 0:
            break
        if LLMatcher.validate_grammar(alone, library, limits=_limits()):
            found = pointer
    return f" at {found}" if found else ""
