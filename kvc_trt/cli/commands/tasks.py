"""`kvc-trt tasks`: the tasks that a model can be asked, and data sets of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvc_trt.cli.commands import convert
from kvc_trt.cli.options.output import OutputPath
from kvc_trt.cli.text import printing
from kvc_trt.files.atomic import check_new_file, write_new_file
from kvc_trt.tables import text_table
from kvc_trt.tasks.dataset import draw_data_set
from kvc_trt.tasks.framing import Framing, plain
from kvc_trt.tasks.own.fitting import sample_of, tokens_of
from kvc_trt.tasks.own.reader import Record, read_data_file
from kvc_trt.tasks.own.sets import tasks_of
from kvc_trt.tasks.registry import all_tasks
from kvc_trt.tasks.registry import task as task_named
from kvc_trt.tasks.task import Task
from kvc_trt.tasks.tokenizer import load_task_tokenizer
from kvc_trt.validation import parse_assignments

_LENGTHS = "prompt tokens: fewest / median / most"


@dataclass(frozen=True)
class WriteArguments:
    """Every argument and option of `write`, by its parameter's name."""

    task: str
    target_tokens: int
    samples: int
    seed: int
    tokenizer: str | None
    max_new_tokens: int | None
    settings: tuple[str, ...]
    file: Path
    force: bool
    as_json: bool


@click.group(invoke_without_command=True)
@printing.json_option
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """List the tasks, write a data set of one, or prepare questions of your own."""
    if context.invoked_subcommand is not None:
        return

    if as_json:
        names = ("name", "family", "summary", "scored", "max_new_tokens", "reads")
        entries = [
            {name: getattr(task, name) for name in names} | {"options": list(task.options)}
            for task in all_tasks().values()
        ]
        printing.print_json({"tasks": entries})
        return
    rows = [(task.name, task.family, task.summary, task.scored) for task in all_tasks().values()]
    printing.show(text_table(("name", "family", "what it asks for", "score"), rows))


@command.command()
@click.argument("task")
@click.option(
    "--target-tokens",
    type=click.IntRange(1, 1 << 24),
    required=True,
    help="Length of prompt and answer together, in tokens.",
)
@click.option("--samples", type=click.IntRange(min=1), default=50, help="Number of samples.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Equal seeds give equal samples.")
@click.option(
    "--tokenizer",
    metavar="PATH_OR_PRESET",
    help="Preset, Hugging Face directory, engine, tokenizer.json or GGUF file; a task of token ids needs none.",
)
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), help="Longest answer in tokens.  [default: the task's own]"
)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="An option of the task, such as depth=0.5.")
@click.option(
    "-o",
    "--output",
    "file",
    type=OutputPath(),
    required=True,
    metavar="FILE",
    help="JSON lines file to write.",
)
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
@printing.json_option
def write(**parameters: Any) -> None:
    """Write samples of TASK as JSON lines and print the file's SHA-256.

    The same arguments give the same bytes. Each line holds a context, a question, the reference answers, and facts
    about the sample; the first line records the task, seed, sizes, options and tokenizer.
    """
    given = WriteArguments(**parameters)
    chosen = task_named(given.task)
    options = parse_assignments(given.settings)
    if given.tokenizer is None and chosen.reads == "text":
        raise click.UsageError(f"task {chosen.name} is text: --tokenizer PATH_OR_PRESET says how long it is")
    check_new_file(given.file, replace=given.force)  # before the work, not after it
    data_set = draw_data_set(
        chosen,
        seed=given.seed,
        samples=given.samples,
        target_tokens=given.target_tokens,
        tokenizer=None if given.tokenizer is None else load_task_tokenizer(given.tokenizer),
        max_new_tokens=given.max_new_tokens,
        options=options,
        progress=printing.progress(),
    )
    write_new_file(given.file, data_set.to_jsonl(), replace=given.force)
    if given.as_json:
        drawn = {"seed": given.seed, "target_tokens": given.target_tokens, "samples": given.samples}
        printing.print_json({"file": str(given.file), "sha256": data_set.digest, "task": chosen.name, **drawn})
    else:
        printing.show(f"{data_set.digest}  {given.file}")


@command.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--tokenizer",
    metavar="PATH_OR_PRESET",
    help="Preset, Hugging Face directory, engine, tokenizer.json or GGUF file, to show the lengths of prompts too.",
)
@printing.json_option
def check(file: Path, tokenizer: str | None, as_json: bool) -> None:
    """Check a file of your own questions (docs/data.md) and summarise its contents.

    The first line that is wrong is named. Lengths are the shortest, the median and the longest of plain prompts.
    """
    data = read_data_file(file)
    framing = None if tokenizer is None else plain(load_task_tokenizer(tokenizer).tokenizer)
    sets = [_set(name, chosen, data.sets[name], framing) for name, chosen in tasks_of(data).items()]
    if as_json:
        printing.print_json({"file": str(file), "sha256": data.digest, "sets": sets})
        return
    headers = ["set", "questions", "longest answer", "score", *(() if framing is None else (_LENGTHS,))]
    rows = [
        [one["set"], f"{one['questions']:,}", f"{one['max_new_tokens']:,}", one["scored"], *_tokens(one)]
        for one in sets
    ]
    printing.show(f"{text_table(headers, rows)}\n\n{data.digest}  {file}")


def _tokens(one: Mapping[str, Any]) -> list[str]:
    """The lengths of a set's prompts in words; nothing where they were not counted."""
    if "tokens" not in one:
        return []
    return [" / ".join(f"{count:,}" for count in one["tokens"]) or "conversations"]


def _set(name: str, chosen: Task, records: Sequence[Record], framing: Framing | None) -> dict[str, Any]:
    """One set of a file. `tokens` are the fewest, the median and the most of its prompts, [] for conversations."""
    found = {"set": name, "questions": len(records), "max_new_tokens": chosen.max_new_tokens, "scored": chosen.scored}
    if framing is None:
        return found
    tokens = sorted(tokens_of(sample_of(one, 0, name), framing) for one in records if not one.messages)
    return {**found, "tokens": [tokens[0], tokens[len(tokens) // 2], tokens[-1]] if tokens else []}


command.add_command(convert.command)
