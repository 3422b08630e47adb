"""The child process that renders a stranger's chat template; `template_process` starts this file and asks it.

Before it sees a template it gives up the rights that none needs: new files, sockets and processes, and memory beyond
`LARGEST_MEMORY`. Processor time is limited for each answer. Besides jinja2 only the standard library is imported. Every
request and every answer is one line of JSON: first the template, answered by an empty object once it compiles, then
conversations, each answered by `text`, by `refused` (the template called raise_exception) or by `error`. A conversation
may set the time (`now`); otherwise it is the clock's. Where jinja2 cannot be imported the only answer is `missing`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import resource
import sys
from datetime import datetime
from typing import Any

LARGEST_MEMORY = 512 << 20
"""The largest address space in bytes."""
LONGEST_TEXT = 16 << 20
"""The largest number of characters in a rendered conversation."""
_LONGEST_PROBLEM = 10_000
"""The largest number of characters of an error that is sent; a few hundred are shown."""
CPU_SECONDS = 3
"""The processor time for one answer, after which the kernel ends the process; the longest conversation takes 1 s."""


def main() -> None:
    """Answer lines of stdin on stdout until stdin ends; the arguments are the caller's `sys.path`."""
    sys.path[:] = sys.argv[1:]
    try:
        environment = _environment()
    except ImportError as error:
        _answer(as_line({"missing": str(error)}))
        return
    _open_everything(environment)
    _give_up_rights()
    template: Any = None
    variables: dict[str, Any] = {}
    while True:
        _limit_time()
        try:
            line = sys.stdin.buffer.readline()
            if not line:
                return
            request = json.loads(line)
            del line
            if template is None:
                variables = request["variables"]
                template = environment.from_string(request["template"])
                answer = as_line({})
            else:
                answer = as_line({"text": _rendered(template, {**variables, **request})})
        except _Refusal as refusal:
            answer = as_line({"refused": str(refusal)[:_LONGEST_PROBLEM]})
        except MemoryError:
            answer = as_line({"error": f"it needs more than {LARGEST_MEMORY >> 20} MiB of memory"})
        except Exception as error:
            answer = as_line({"error": (str(error) or type(error).__name__)[:_LONGEST_PROBLEM]})
        _answer(answer)


def as_line(value: Any) -> bytes:
    """Return a value as one line of JSON in UTF-8, half as long as with escapes; lone surrogates pass unchanged."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _answer(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


class _Refusal(Exception):
    """The error of a template's `raise_exception`: it refuses these messages."""


def _rendered(template: Any, names: dict[str, Any]) -> str:
    pieces, length = [], 0
    moment = names.pop("now", None)
    if moment is not None:
        names["strftime_now"] = datetime.fromisoformat(moment).strftime
    for piece in template.generate(names):
        pieces.append(piece)
        length += len(piece)
        if length > LONGEST_TEXT:
            raise ValueError(f"it makes more than {LONGEST_TEXT} characters")
    text = "".join(pieces)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("it makes half of a character (a lone surrogate)")
    return text


def _environment() -> Any:
    """The environment that transformers gives to a chat template, and nothing else; unsafe attributes are errors."""
    from jinja2 import ext, nodes, sandbox
    from jinja2.exceptions import SecurityError

    class Environment(sandbox.ImmutableSandboxedEnvironment):
        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            raise SecurityError(f"it reaches for the attribute {attribute!r} of a {type(obj).__name__}")

    class Generation(ext.Extension):
        """`{% generation %}` marks the text that the model writes; only training uses it."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, Generation])
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _open_everything(environment: Any) -> None:
    """Have Python and Jinja load everything that they would load late: modules, the codec of string literals, the time
    zone."""
    for module in ("jinja2.constants", "jinja2.debug", "pprint", "random", "textwrap"):
        importlib.import_module(module)
    _strftime_now("%c")
    for template in ("{{ 'a' }}{% for name in [1] %}{{ name }}{% endfor %}", "{{ raise_exception('a') }}"):
        with contextlib.suppress(_Refusal):
            environment.from_string(template).render()


def _give_up_rights() -> None:
    """Set limits that cannot be raised again."""
    nothing = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE)
    for kind, limit in [(resource.RLIMIT_AS, LARGEST_MEMORY), *((kind, 0) for kind in nothing)]:
        resource.setrlimit(kind, (limit, limit))


def _limit_time() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, largest = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + CPU_SECONDS, largest))


if __name__ == "__main__":
    main()
