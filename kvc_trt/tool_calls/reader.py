"""The text of an answer, read as it arrives: content, thoughts, and tool calls.

Characters are read one by one, so the deltas say the same however the text was cut into pieces. A call is announced
once its name and the beginning of its arguments are there. Text that turns out before that to be no call is content, to
the character; where a call breaks off later, the rest is content, and the arguments stay incomplete. White space around
thoughts, before calls and after the last one is dropped.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal

from kvc_trt.tool_calls.call_text import CallText
from kvc_trt.tool_calls.deltas import Arguments, CallStart, Content, Delta, Reasoning
from kvc_trt.tool_calls.json_text import SPACE
from kvc_trt.tool_calls.named_call import NamedCall
from kvc_trt.tool_calls.xml_call import XmlCall

THOUGHTS = ("<think>", "</think>")
"""The marks around a model's thoughts."""
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class CallMarks:
    """The marks by which a model announces tool calls, and the form of its calls."""

    around: tuple[tuple[str, str], ...] = ()
    """Texts before and after calls; the latter may be empty."""
    bare: bool = False
    """True if an answer may also begin with a call, or a list of calls, and nothing before it."""
    writing: Literal["json", "named", "xml"] = "json"
    """The form of a call after a mark: a JSON object, or that of `named_call.py` or `xml_call.py`."""
    inside: tuple[str, ...] = ()
    """Marks within a call."""

    def new_call(self, tools: Mapping[str, Mapping[str, Any]], first: str) -> CallText | NamedCall | XmlCall | None:
        """Return the reader of a call that begins with this character; None if no call does."""
        if first == "{":
            return CallText(tools.keys())
        if self.writing == "named":
            return NamedCall(tools.keys())
        return XmlCall(tools) if self.writing == "xml" and first == "<" else None


class _Mode(Enum):
    THOUGHTS = auto()
    CONTENT = auto()
    MARKED = auto()
    """After a mark, before a call or a list of calls."""
    LISTED = auto()
    """Before a call of a list."""
    CALL = auto()
    BETWEEN = auto()
    """After a call of a list."""
    CLOSING = auto()
    """After the calls, before the mark that ends them."""
    DONE = auto()


class Reader:
    """Reads one answer. `feed` it the text, then `finish`."""

    def __init__(
        self,
        marks: CallMarks,
        tools: Iterable[str] | Mapping[str, Mapping[str, Any]] = (),
        *,
        thinks: bool = False,
        thinking: bool = False,
        parallel: bool = True,
        make_id: Callable[[], str] | None = None,
    ) -> None:
        """Begin an answer in which `tools` may be called: names, or the schemas of parameters by name. None: no calls.

        `thinks`: the model may begin with thoughts; `thinking`: the prompt has begun them already. Without `parallel`
        nothing counts after the first call.
        """
        self._tools = tools if isinstance(tools, Mapping) else {name: {} for name in tools}
        self._marks = marks if self._tools else CallMarks()
        self._openings = tuple(opening for opening, _ in self._marks.around)
        pairs = (*self._marks.around, *([THOUGHTS] if thinks or thinking else ()))
        self.looks_for = tuple(mark for pair in (*pairs, self._marks.inside) for mark in pair if mark)
        """The marks that mean something here."""
        self._thinks, self._parallel = thinks and not thinking, parallel
        self._is_plain = not (self._tools or thinks)
        """True where all is content."""
        self._make_id = make_id or call_id
        self._mode = _Mode.THOUGHTS if thinking else _Mode.CONTENT
        self._begins = True
        """True while nothing was said and no call was made since the beginning, or the thoughts, or the last call."""
        self._after_thoughts = thinking
        """True while white space would follow the beginning or the end of thoughts."""
        self._space = ""
        """White space that is dropped unless more of the same kind follows."""
        self._held = ""
        """Text that may become a mark."""
        self._raw: list[str] = []
        """The text of a call that was not announced, from its mark on."""
        self._closing = ""
        self._in_list = False
        self._call: CallText | NamedCall | XmlCall = CallText(self._tools.keys())
        self._announced = False
        self._calls = 0
        self._deltas: list[Delta] = []

    @property
    def has_calls(self) -> bool:
        """True if a call was announced: the answer's finish_reason is then tool_calls."""
        return self._calls > 0

    @property
    def is_done(self) -> bool:
        """True if nothing counts that follows."""
        return self._mode is _Mode.DONE

    def feed(self, text: str) -> list[Delta]:
        """Return the deltas that are certain with this text; pieces of one kind are one delta."""
        if self._is_plain:
            return [Content(text)] if text else []
        for character in text:
            self._read(character)
        return self._new_deltas()

    def finish(self) -> list[Delta]:
        """Return the text held back, at the end of the answer."""
        if self._mode is _Mode.THOUGHTS:
            self._think(self._held)
        elif self._mode is _Mode.CONTENT:
            if self._held or not self._calls:
                self._say(self._held)
        elif self._mode in (_Mode.MARKED, _Mode.LISTED, _Mode.CALL) and not self._announced:
            self._say_raw()
        self._held, self._mode = "", _Mode.DONE
        return self._new_deltas()

    def _new_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _read(self, character: str) -> None:
        match self._mode:
            case _Mode.THOUGHTS:
                self._read_thought(character)
            case _Mode.CONTENT:
                self._read_content(character)
            case _Mode.MARKED | _Mode.LISTED | _Mode.BETWEEN:
                self._read_before_call(character)
            case _Mode.CALL:
                self._read_call(character)
            case _Mode.CLOSING:
                self._read_closing(character)
            case _Mode.DONE:
                pass

    def _read_thought(self, character: str) -> None:
        self._held += character
        end = THOUGHTS[1]
        if self._held == end:
            self._mode, self._held, self._space = _Mode.CONTENT, "", ""
            self._begins = self._after_thoughts = True
            return
        while not end.startswith(self._held):
            first, self._held = self._held[0], self._held[1:]
            self._pass(first, self._think)

    def _read_content(self, character: str) -> None:
        self._held += character
        while self._held:
            if self._held in self._openings:
                self._open(dict(self._marks.around)[self._held])
                return
            thoughts = (THOUGHTS[0],) if self._begins and self._thinks and not self._calls else ()
            if self._held in thoughts:
                self._mode, self._held, self._space, self._thinks = _Mode.THOUGHTS, "", "", False
                self._after_thoughts = True
                return
            if any(mark.startswith(self._held) for mark in (*self._openings, *thoughts)):
                return
            first, rest = self._held[0], self._held[1:]
            if first in "{[" and self._begins and self._marks.bare:
                self._held = ""
                self._open("")
                for one in first + rest:
                    self._read(one)
                return
            self._held = rest
            self._pass(first, self._say)

    def _pass(self, character: str, say: Callable[[str], None]) -> None:
        """Say a character, but hold white space until something follows."""
        if character in SPACE:
            self._space += "" if self._after_thoughts else character
        elif character == ";" and self._begins and self._calls and self._marks.bare:
            self._space += character  # between calls
        else:
            say(character)

    def _open(self, closing: str) -> None:
        """Begin calls, with the mark that is held if there is one."""
        self._raw = [self._space + self._held]
        self._held, self._space = "", ""
        self._mode, self._closing, self._in_list, self._announced = _Mode.MARKED, closing, False, False

    def _read_before_call(self, character: str) -> None:
        self._raw.append(character)
        if character in SPACE:
            return
        match self._mode, character:
            case ((_Mode.MARKED | _Mode.LISTED), "{"):
                self._begin_call(character)
            case _Mode.MARKED, "[":
                self._mode, self._in_list = _Mode.LISTED, True
            case _Mode.BETWEEN, ",":
                self._mode = _Mode.LISTED
            case _Mode.BETWEEN, "]":
                self._after_calls()
            case _Mode.MARKED, _:
                self._begin_call(character)
            case _:
                self._give_up()

    def _begin_call(self, first: str) -> None:
        call = self._marks.new_call(self._tools, first)
        if call is None or not call.push(first):
            self._give_up()
            return
        self._mode, self._call, self._announced = _Mode.CALL, call, False

    def _read_call(self, character: str) -> None:
        if not self._announced:
            self._raw.append(character)
        if not self._call.push(character):
            if self._announced:
                self._raw = [character]
            self._give_up()
            return
        if self._call.has_begun and not self._announced:
            self._announced, self._raw = True, []
            assert self._call.name is not None
            self._deltas.append(CallStart(self._calls, self._make_id(), self._call.name))
            self._calls += 1
        new = self._call.new_arguments()
        if new:
            self._add(Arguments(self._calls - 1, new))
        if self._call.is_whole and self._parallel and not self._in_list:
            self._after_calls()
        elif self._call.is_whole:
            self._mode = _Mode.BETWEEN if self._parallel else _Mode.DONE

    def _after_calls(self) -> None:
        self._raw = []
        self._mode = _Mode.CLOSING if self._closing else _Mode.CONTENT
        self._begins, self._after_thoughts, self._space, self._held = True, False, "", ""

    def _read_closing(self, character: str) -> None:
        if not self._held and character in SPACE:
            return
        self._held += character
        if self._held == self._closing:
            self._mode, self._held = _Mode.CONTENT, ""
        elif not self._closing.startswith(self._held):
            held, self._held, self._mode = self._held, "", _Mode.CONTENT
            for one in held:
                self._read(one)

    def _give_up(self) -> None:
        """Take the text that turned out to be no call as content. Its last character may begin something else."""
        last = self._raw.pop()
        self._mode = _Mode.CONTENT
        self._say_raw()
        self._begins = False
        self._read(last)

    def _say_raw(self) -> None:
        text, self._raw = "".join(self._raw), []
        self._say(text)

    def _say(self, text: str) -> None:
        text, self._space = self._space + text, ""
        if text:
            self._begins = self._after_thoughts = False
            self._add(Content(text))

    def _think(self, text: str) -> None:
        if text:
            text, self._space = self._space + text, ""
            self._after_thoughts = False
            self._add(Reasoning(text))

    def _add(self, delta: Content | Reasoning | Arguments) -> None:
        last = self._deltas[-1] if self._deltas else None
        if type(last) is type(delta) and getattr(last, "index", None) == getattr(delta, "index", None):
            assert isinstance(last, Content | Reasoning | Arguments)
            text = last.text + delta.text
            delta = Arguments(delta.index, text) if isinstance(delta, Arguments) else type(delta)(text)
            self._deltas.pop()
        self._deltas.append(delta)


def call_id() -> str:
    """Return a new id of a call, as OpenAI's are."""
    return f"call_{_random(24)}"


def short_call_id() -> str:
    """Return a new id of a call, as Mistral's templates want it."""
    return _random(9)


def _random(characters: int) -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(characters))
