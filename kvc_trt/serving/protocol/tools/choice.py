"""Read a request's `tools`, `tool_choice` and `parallel_tool_calls`: the tools that the model may or must call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from kvc_trt.errors import InputError, describe
from kvc_trt.runtime.chat.tools import Tool, check_tools, tool_names
from kvc_trt.runtime.kinds import Kind

Mode = Literal["auto", "none", "required"]
_FORMS = '\'auto\', \'none\', \'required\' or {"type": "function", "function": {"name": ...}}'


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and the rules for calling them."""

    tools: tuple[Tool, ...] = ()
    """All tools of the request, without fields that only the server reads."""
    mode: Mode = "none"
    name: str | None = None
    """The one tool that must be called; None if the request names none."""
    allowed: tuple[str, ...] | None = None
    """Names of the tools that may be called; None for all."""
    parallel: bool = True
    """False if an answer ends after its first call."""

    @property
    def offered(self) -> list[Tool] | None:
        """The tools that the prompt describes; None for none."""
        return list(self.tools) if self.tools and self.mode != "none" else None

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that may be called."""
        names = (self.name,) if self.name is not None else self.allowed
        return [tool for tool in self.offered or () if names is None or tool["function"]["name"] in names]

    @property
    def may_call_several(self) -> bool:
        """True if an answer may have more than one call."""
        return self.parallel and self.name is None

    @property
    def is_forced(self) -> bool:
        """True if the model must call a tool."""
        return self.mode == "required" or self.name is not None


def tool_use(given: Mapping[str, object]) -> ToolUse:
    """Return the tools and rules in a request's fields; InputError, beginning with the name of a wrong field."""
    tools = tuple(check_tools(given["tools"])) if given.get("tools") is not None else ()
    parallel = given.get("parallel_tool_calls")
    use = ToolUse(tools, parallel=True if parallel is None else Kind.SWITCH.plain(parallel, "parallel_tool_calls"))
    chosen = given.get("tool_choice")
    if chosen is None:
        return replace(use, mode="auto" if tools else "none")
    if isinstance(chosen, str):
        return _by_mode(use, chosen)
    if not isinstance(chosen, Mapping):
        raise InputError(f"tool_choice is {describe(chosen)}, expected {_FORMS}")
    _check_given(use)
    kind = chosen.get("type")
    if kind == "allowed_tools":
        return _allowed(use, chosen.get("allowed_tools"))
    if kind != "function":
        raise InputError(f"tool_choice has the type {describe(kind)}, expected {_FORMS}")
    return replace(use, mode="auto", name=_named(use, chosen))


def _by_mode(use: ToolUse, chosen: str) -> ToolUse:
    modes: dict[str, Mode] = {mode: mode for mode in get_args(Mode)}
    if chosen not in modes:
        raise InputError(f"tool_choice is {describe(chosen)}, expected {_FORMS}")
    if chosen == "required":
        _check_given(use)
    return replace(use, mode=modes[chosen] if use.tools else "none")


def _allowed(use: ToolUse, given: object) -> ToolUse:
    if not isinstance(given, Mapping) or given.get("mode") not in ("auto", "required"):
        raise InputError(f"tool_choice: allowed_tools is {describe(given)}, expected an object with mode and tools")
    tools = given.get("tools")
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        raise InputError(f"tool_choice: tools of allowed_tools is {describe(tools)}, expected a list of functions")
    mode: Mode = "required" if given["mode"] == "required" else "auto"
    return replace(use, mode=mode, allowed=tuple(_named(use, one) for one in tools))


def _named(use: ToolUse, given: object) -> str:
    """Return the name in {"type": "function", "function": {"name": ...}}; InputError if it is not one of the tools."""
    function: Any = given.get("function") if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InputError(f"tool_choice: expected a function with a name, found {describe(given)}")
    if name not in tool_names(use.tools):
        raise InputError(f"tool_choice names {describe(name)}, and tools has {describe(tool_names(use.tools))}")
    return name


def _check_given(use: ToolUse) -> None:
    if not use.tools:
        raise InputError("tool_choice asks for a call, and there are no tools")
