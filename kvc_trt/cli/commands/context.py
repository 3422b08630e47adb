"""`kvc-trt context`: store the cache that an engine keeps of a prompt in a file, and show the contents of such a
file."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import cloup

from kvc_trt import Engine
from kvc_trt.backends.registry import names
from kvc_trt.cli.options.output import OutputPath
from kvc_trt.cli.options.prompts import PromptOptions, read_prompts, warn_of_bare_text
from kvc_trt.cli.options.types import SEALED
from kvc_trt.cli.text import printing
from kvc_trt.contexts.file import inspect_context
from kvc_trt.errors import BarePromptWarning, InputError, escaped
from kvc_trt.files.atomic import check_new_file
from kvc_trt.sizes import readable_size
from kvc_trt.tables import text_table

if TYPE_CHECKING:
    from kvc_trt.contexts.file import StoredTensor
    from kvc_trt.contexts.header import ContextHeader
    from kvc_trt.runtime import Context

BARE_PROMPT_HINT = "write the template's own words around the text; --raw silences this warning"


@dataclass(frozen=True)
class SaveArguments:
    """Every argument and option of `save`, by its parameter's name."""

    engine: Path
    prompt_file: Path | None
    prompt: str | None
    prompt_ids: Path | None
    raw: bool
    start: Path | None
    """The stored context that the prompt continues."""
    file: Path
    force: bool
    backend: str | None
    threads: int | None
    sealed: bool
    as_json: bool

    def one_prompt(self) -> PromptOptions:
        """Return the prompt; InputError for a file of several, UsageError unless exactly one option gives it."""
        asked = read_prompts(self.prompt, self.prompt_file, self.prompt_ids, None, None, document=None, system=None)
        if len(asked) > 1:
            raise InputError(f"{self.prompt_ids}: a context is of one prompt, found {len(asked)}")
        return asked


@click.group()
def command() -> None:
    """Store compressed contexts in files, and show the contents of such a file."""


@command.command(cls=cloup.Command)
@cloup.argument("engine", type=click.Path(path_type=Path))
@cloup.option_group(
    "Prompt (one of these)",
    cloup.option("--prompt-file", type=click.Path(path_type=Path), help="A UTF-8 text file with the prompt."),
    cloup.option("--prompt", help="The prompt itself."),
    cloup.option("--prompt-ids", type=click.Path(path_type=Path), help="A JSON file with a list of token ids."),
)
@cloup.option("--raw", is_flag=True, help="Send the text to a chat model without its template, and without a warning.")
@cloup.option("--context", "start", type=click.Path(path_type=Path), help="A stored context that the prompt continues.")
@cloup.option("-o", "--output", "file", type=OutputPath(), required=True, metavar="CONTEXT", help="File to write.")
@cloup.option("--force", is_flag=True, help="Overwrite CONTEXT if it exists.")
@cloup.option(
    "--backend", type=click.Choice(names()), help="Backend that runs the engine.  [default: the one it was built for]"
)
@cloup.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: all cores]")
@SEALED
@printing.json_option
def save(**parameters: Any) -> None:
    """Read a prompt with ENGINE and store the compressed cache.

    `kvc-trt run ENGINE --context CONTEXT` goes on from there, without reading the prompt again.
    """
    given = SaveArguments(**parameters)
    asked = given.one_prompt()
    check_new_file(given.file, replace=given.force)  # before the work, not after it
    engine = Engine.open(
        given.engine, backend=given.backend, threads=given.threads, sealed=given.sealed, progress=printing.progress()
    )
    before = None if given.start is None else engine.load_context(given.start)
    if before is None and not given.raw:
        warn_of_bare_text(asked, engine, BARE_PROMPT_HINT)
    engine.session()
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BarePromptWarning)  # it is said already, unless --raw is given
        context = engine.context(asked.for_engine(engine)[0], context=before)
    seconds = time.perf_counter() - started
    engine.save_context(context, given.file, replace=given.force)
    _show_saved(given, context, seconds)


def _show_saved(given: SaveArguments, context: Context, seconds: float) -> None:
    size, length = given.file.stat().st_size, context.logical_length
    if given.as_json:
        document = {"context": str(given.file), "bytes": size, "seconds": seconds, "logical_length": length}
        printing.print_json({**document, "cache_lengths": list(context.cache_lengths), "tokens": context.token_digest})
    else:
        printing.show(f"{given.file}: {length} tokens in {readable_size(size)}, {seconds:.2f} s")


@command.command()
@click.argument("context", type=click.Path(path_type=Path))
@printing.json_option
def inspect(context: Path, as_json: bool) -> None:
    """Check every byte of the file CONTEXT and show its contents; needs no engine."""
    header, tensors = inspect_context(context)
    if as_json:
        printing.print_json({"context": str(context), "intact": True, **_as_json(header, tensors)})
    else:
        printing.show(f"{_heading(context, header)}\n\n{_table(header, tensors)}")


def _heading(context: Path, header: ContextHeader) -> str:
    lines = (
        f"{context}: intact, written by {header.written_by}",
        f"model   {header.model_name}",
        f"policy  {header.policy_name}",
        f"format  {header.kv_cache}",
        f"text    {header.logical_length} tokens, digest {header.tokens[:12]}",
        f"fits    engines of compatibility digest {header.compatibility[:12]}; made by engine {header.engine[:12]}",
    )
    return "\n".join(map(escaped, lines))


def _table(header: ContextHeader, tensors: list[StoredTensor]) -> str:
    """Group the caches whose tensors are alike: 80 equal layers are one line."""
    kinds: dict[tuple[str, str, tuple[int, ...], int], list[int]] = {}
    for tensor in tensors:
        kind, _, cache = tensor.name.partition(".")
        kinds.setdefault((kind, tensor.dtype, tensor.shape, tensor.nbytes), []).append(int(cache or 0))
    rows = [
        (kind, printing.ranges(caches), dtype, "x".join(map(str, shape)), readable_size(nbytes * len(caches)))
        for (kind, dtype, shape, nbytes), caches in kinds.items()
    ]
    total = sum(tensor.nbytes for tensor in tensors)
    return f"{text_table(('tensor', 'caches', 'dtype', 'shape', 'bytes'), rows, right=(4,))}\n{readable_size(total)}"


def _as_json(header: ContextHeader, tensors: list[StoredTensor]) -> dict[str, Any]:
    shown = {tensor.name: {"dtype": tensor.dtype, "shape": list(tensor.shape)} for tensor in tensors}
    fields = {**header.model_dump(), "kv_cache": header.kv_cache}
    return {**fields, "tensors": shown, "bytes": sum(tensor.nbytes for tensor in tensors)}
