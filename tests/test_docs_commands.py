"""Commands that the documentation shows exist, with the options shown: kvc-trt's, make's targets, Python modules."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from kvc_trt.cli.main import group
from tests.test_docs import FENCED, PAGES, ROOT, name

LINE = re.compile(r"^(?: {4}|\$ )((?:[^\n]*\\\n)*[^\n]*)$", flags=re.MULTILINE)
"""A line that may be a command, with those that continue it."""
SPAN = re.compile(r"`([^`]+)`")
ENDS = re.compile(r"\s(?:&&|\|\||[|><#]|2>)(?:\s|$)|;\s")
"""Signs that end a command in a line of a shell."""
OURS = re.compile(r"(?:^|\s|/)kvc-trt ([a-z].*)$")
MADE = re.compile(r"^make ([a-z].*)$")
MODULE = re.compile(r"(?:^|\s|/)python3? -m ((?:benchmarks|plugins_cuda|plugins_cpu|training)\b(?!\.NAME).*)$")
HASHED = {"kv", "lists", "lists,", "prompt", "continuation", "answer"}
"""Words after "kvc-trt" that begin the input of a proof's digest, not a command (docs/proof.md)."""
TARGETS = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def commands(page: Path) -> Iterator[str]:
    """Yield every piece of a page that may be a command, on one line; optional parts lose their brackets."""
    text = page.read_text()
    for found in (*LINE.findall(text), *SPAN.findall(FENCED.sub("", text))):
        yield re.sub(r"(?<!\S)\[|\](?!\S)", "", " ".join(found.replace("\\\n", " ").split()))


def words(text: str) -> list[str]:
    """Return the words of one command, up to its end."""
    text = ENDS.split(text, maxsplit=1)[0]
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def options_of(found: list[str]) -> list[str]:
    """Return the options of a command, without their values."""
    return [word.partition("=")[0] for word in found if re.match(r"--?[a-zA-Z]", word)]


def resolved(found: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command of kvc-trt that words begin with, and the words after it."""
    command: click.Command = group
    while isinstance(command, click.Group) and found and not found[0].startswith("-"):
        inner = command.get_command(click.Context(command), found[0])
        if inner is None:
            break
        command, found = inner, found[1:]
    return command, found


def wrong_options(page: Path) -> Iterator[str]:
    """Yield the mistakes in the kvc-trt commands that a page shows."""
    for text in commands(page):
        found = OURS.search(text)
        if found is None:
            continue
        command, rest = resolved(words(found[1]))
        if command is group and rest[0] not in HASHED:
            yield f"{name(page)}: {text}: no such command"
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        unknown = set(options_of(rest)) - known - {"--help", "-h"}
        if unknown:
            yield f"{name(page)}: {text}: {', '.join(sorted(unknown))} unknown"


def wrong_targets(page: Path) -> Iterator[str]:
    """Yield the commands of make on a page whose targets there are not."""
    for text in commands(page):
        found = MADE.match(text)
        if found is not None:
            named = {word for word in words(found[1]) if re.fullmatch(r"[a-z][a-z0-9-]*", word)}
            if not named <= TARGETS:
                yield f"{name(page)}: {text}: no such target"


def wrong_modules(page: Path) -> Iterator[str]:
    """Yield the mistakes in the Python modules that a page runs."""
    for text in commands(page):
        found = MODULE.search(text)
        if found is None:
            continue
        module, *rest = words(found[1])
        path = ROOT / module.replace(".", "/")
        sources = [path.with_suffix(".py")] if path.with_suffix(".py").is_file() else sorted(path.glob("*.py"))
        if not sources:
            yield f"{name(page)}: {text}: no such module"
        source = "\n".join(one.read_text() for one in sources)
        unknown = {option for option in options_of(rest) if f'"{option}"' not in source}
        if sources and unknown:
            yield f"{name(page)}: {text}: {', '.join(sorted(unknown))} unknown"


def test_commands_of_kvc_trt_have_the_options_shown() -> None:
    wrong = [one for page in PAGES for one in wrong_options(page)]
    assert not wrong, "\n".join(wrong)


def test_targets_of_make_exist() -> None:
    wrong = [one for page in PAGES for one in wrong_targets(page)]
    assert not wrong, "\n".join(wrong)


def test_modules_exist_and_read_the_options_shown() -> None:
    wrong = [one for page in PAGES for one in wrong_modules(page)]
    assert not wrong, "\n".join(wrong)
