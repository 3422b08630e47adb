"""`kvc-trt tasks convert`: published data sets, from files that the user has, as one file of questions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from kvc_trt.cli.options.output import OutputPath
from kvc_trt.cli.text import printing
from kvc_trt.errors import InputError
from kvc_trt.files.atomic import check_new_file, write_new_pieces
from kvc_trt.tasks.own.published.longbench import longbench
from kvc_trt.tasks.own.published.pairs import Columns, pairs
from kvc_trt.tasks.own.published.ruler_qa import ruler_qa
from kvc_trt.tasks.own.published.scbench import scbench
from kvc_trt.tasks.own.reader import MOST_NEW_TOKENS, line_of
from kvc_trt.tasks.own.scores import FIRST_LINE, score_named
from kvc_trt.tasks.tokenizer import load_task_tokenizer

_Command = Callable[..., None]


@click.group(name="convert")
def command() -> None:
    """Convert published data sets, from their own files, to a file for --data (docs/data.md)."""


def _output(function: _Command) -> _Command:
    """Add -o and --force."""
    options = (
        click.option(
            "-o",
            "--output",
            "file",
            type=OutputPath(),
            required=True,
            metavar="FILE",
            help="JSON lines file to write.",
        ),
        click.option("--force", is_flag=True, help="Overwrite FILE if it exists."),
    )
    for option in reversed(options):
        function = option(function)
    return function


_DIRECTORY = click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")


@command.command(name="longbench")
@_DIRECTORY
@_output
def of_longbench(directory: Path, file: Path, force: bool) -> None:
    """LongBench's files in DIR, as its data.zip has them (data/narrativeqa.jsonl, ...), LongBench-E's too."""
    _write(longbench(directory), file, force)


@command.command(name="ruler-qa")
@_DIRECTORY
@click.option(
    "--tokenizer", required=True, metavar="PATH_OR_PRESET",
    help="Preset, Hugging Face directory, engine, tokenizer.json or GGUF file whose tokenizer "
         "counts lengths.",
)  # fmt: skip
@click.option(
    "--target-tokens",
    type=click.IntRange(1, 1 << 24),
    required=True,
    help="Length of prompt and answer together, in tokens.",
)
@click.option("--samples", type=click.IntRange(min=1), default=50, help="Questions of qa_1, and as many of qa_2.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Equal seeds give equal documents.")
@_output
def of_ruler_qa(
    directory: Path, tokenizer: str, target_tokens: int, samples: int, seed: int, file: Path, force: bool
) -> None:
    """RULER's qa_1 and qa_2, from squad.json (SQuAD 2.0) and hotpotqa.json (HotpotQA) in DIR."""
    encode = load_task_tokenizer(tokenizer).encode
    lines = ruler_qa(directory, encode=encode, target_tokens=target_tokens, samples=samples, seed=seed)
    _write(lines, file, force)


@command.command(name="scbench")
@_DIRECTORY
@click.option(
    "--history", is_flag=True,
    help="Ask each question after the earlier ones and their answers, as a conversation; needs a "
         "chat template.",
)  # fmt: skip
@_output
def of_scbench(directory: Path, history: bool, file: Path, force: bool) -> None:
    """SCBench's files in DIR (scbench_kv.jsonl or multi_turn_kv.jsonl, ...), except repoqa."""
    _write(scbench(directory, history=history), file, force)


@command.command(name="pairs")
@click.argument("source", type=click.Path(path_type=Path), metavar="TABLE")
@click.option("--context", required=True, metavar="COLUMN", help="Column of the texts that questions are about.")
@click.option("--answers", metavar="COLUMN", help="Column of the right answers; without it, faithfulness is measured.")
@click.option("--question", metavar="TEXT", help="Question to ask about every row.")
@click.option("--question-column", metavar="COLUMN", help="Column of the questions, if each row has its own.")
@click.option("--score", metavar="NAME", help="Score of the answers.  [default: f1]")
@click.option(
    "--max-new-tokens", type=click.IntRange(1, MOST_NEW_TOKENS), help="Longest answer in tokens.  [default: 64]"
)
@_output
def of_pairs(
    source: Path, file: Path, force: bool, score: str | None, max_new_tokens: int | None, **given: Any
) -> None:
    """A table of texts and references: JSON lines, a JSON list (.json) or CSV (.csv).

    CNN/DailyMail: --context article --answers highlights; XSUM: --context document --answers summary; SAMSum: --context
    dialogue --answers summary. Each with --question and --score rouge-l.
    """
    if (given["question"] is None) == (given["question_column"] is None):
        raise click.UsageError("give --question or --question-column")
    if score is not None:
        score_named(score)
        if score.removesuffix(FIRST_LINE) == "classification":
            raise click.UsageError(
                "--score classification: it needs the list of all classes, which a table does not have"
            )
        if given["answers"] is None:
            raise click.UsageError("--score goes with --answers")
    columns = Columns(given["context"], given["answers"], given["question_column"], given["question"])
    _write(pairs(source, columns, score=score, max_new_tokens=max_new_tokens), file, force)


def _write(lines: Iterable[dict[str, Any]], file: Path, force: bool) -> None:
    """Write the lines as they come, all of them or none, and say how many of which set there are."""
    check_new_file(file, replace=force)
    counts: dict[str, int] = {}

    def pieces() -> Iterator[bytes]:
        for line in lines:
            name = line.get("set", file.stem)
            counts[name] = counts.get(name, 0) + 1
            try:
                yield line_of(line).encode()
            except UnicodeEncodeError as error:
                raise InputError(f"{name}, question {counts[name]}: half of a character (a lone surrogate)") from error
        if not counts:
            raise InputError("the files hold no questions")

    write_new_pieces(file, pieces(), replace=force)
    printing.show(
        f"{file}: {sum(counts.values())} questions: " + ", ".join(f"{n} {name}" for name, n in counts.items())
    )
