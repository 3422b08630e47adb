"""`kvc-trt run`: answer prompts with an engine."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import cloup

from kvc_trt import Engine
from kvc_trt.api.side import Side
from kvc_trt.backends.registry import names
from kvc_trt.cli.asking.beside import answer_beside, open_beside, side_by_side
from kvc_trt.cli.asking.conversation import converse, is_conversation
from kvc_trt.cli.options.answer import answer_options, take_rules
from kvc_trt.cli.options.output import OutputPath
from kvc_trt.cli.options.prompts import warn_of_bare_text, warn_of_unknown_words
from kvc_trt.cli.options.run import END, FROM_INPUT, RunArguments
from kvc_trt.cli.options.types import PREFILL_PRECISION, SEALED
from kvc_trt.cli.text.printing import answer_text, json_option, print_json, progress, show
from kvc_trt.cli.text.run_report import report, summary
from kvc_trt.errors import BarePromptWarning
from kvc_trt.proof import write_proof

if TYPE_CHECKING:
    from kvc_trt.runtime import Context, Event, Output, Session

BARE_PROMPT_HINT = "--chat TEXT asks through the template, --raw silences this warning"


@cloup.command()
@cloup.argument("engine", type=click.Path(path_type=Path))
@cloup.option_group(
    "Prompt (one of these)",
    cloup.option("--prompt", help="The prompt itself."),
    cloup.option("--prompt-file", type=click.Path(path_type=Path), help="A UTF-8 text file with the prompt."),
    cloup.option(
        "--prompt-ids",
        type=click.Path(path_type=Path),
        help="A JSON file with a list of token ids, or a list of lists for a batch.",
    ),
    cloup.option(
        "--chat",
        metavar="[TEXT]",
        is_flag=False,
        flag_value=FROM_INPUT,
        help="A question to a chat model, through its chat template. On a terminal, or without TEXT, further questions "
        f"are read line by line and answered as turns, until the end of the input or {END}; on a terminal, /help lists "
        "the commands.",
    ),
    cloup.option(
        "--messages",
        type=click.Path(path_type=Path),
        help="A JSON file with a conversation, a list of {role, content}, or a list of such lists for a batch.",
    ),
)
@cloup.option_group(
    "Beside it",
    cloup.option(
        "--document",
        type=click.Path(path_type=Path),
        help="A UTF-8 text file that --chat asks about; it precedes the first question.",
    ),
    cloup.option("--system", metavar="TEXT", help="The system message before --chat or --messages."),
    cloup.option(
        "--raw", is_flag=True, help="Send the text to a chat model without its template, and without a warning."
    ),
)
@cloup.option_group(
    "Start",
    cloup.option(
        "--context",
        type=click.Path(path_type=Path),
        help="A file written by kvc-trt context save. The prompt continues its text; without a "
        "prompt, the answer does.",
    ),
)
@cloup.option_group(
    "Comparison",
    cloup.option(
        "--beside",
        metavar="POLICY|ENGINE_DIR",
        help="Also answer with another policy over the same weights (full: the whole cache), or with "
        "another engine of the model, and show both side by side.",
    ),
)
@cloup.option_group(
    "Answer",
    cloup.option("--stream", is_flag=True, help="Print the text as it is generated."),
    *answer_options(),
    cloup.option(
        "-o",
        "--output",
        "proof_file",
        type=OutputPath(),
        help="File to which --kv-proof writes the proof.",
    ),
)
@cloup.option_group(
    "Engine",
    cloup.option(
        "--backend",
        type=click.Choice(names()),
        help="Backend that runs the engine; torch runs its weights in PyTorch, on a GPU if there are "
        "CUDA kernels (KVC_TRT_KERNELS, or the package's own), otherwise slowly on the CPU.  "
        "[default: the one it was built for]",
    ),
    cloup.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: all cores]"),
    SEALED,
    cloup.option(
        "--prefill-slice-ms",
        type=click.FloatRange(min=0, min_open=True),
        metavar="MS",
        help="Read the prompts of a batch one by one, in slices of at most this many milliseconds, "
        "with a decode step of the other rows after each slice.  [default: all prompts together]",
    ),
    PREFILL_PRECISION,
    cloup.option(
        "--speculate",
        metavar="ngram[:TOKENS]",
        help="Check drafts of this many tokens at once where the text repeats itself; answers stay "
        "the same. Needs an engine built with --draft-tokens.",
    ),
)
@json_option
def command(**parameters: Any) -> None:
    """Answer the prompt with the engine in directory ENGINE.

    The text goes to stdout, a summary to stderr. An answer ends with reason stop (an end token or --stop), length
    (--max-new-tokens) or capacity (the cache is full, or the engine's last position is reached). Without --temperature
    the best token is always taken, whatever sampling a model's generation_config.json sets.

    With --chat alone, each line of standard input is a question, and its answer costs one pass over the new part of the
    conversation; --json prints a line of JSON for each.
    """
    rules = take_rules(parameters)
    given = RunArguments(rules=rules, **parameters)
    asked = given.prompts()
    started = time.perf_counter()
    engine = _open(given)
    prompts = asked.for_engine(engine)
    context = None if given.context is None else engine.load_context(given.context)
    if context is None and not given.raw:
        warn_of_bare_text(asked, engine, BARE_PROMPT_HINT)
    session = engine.session(engine.rows_for(prompts))
    loaded = time.perf_counter() - started
    if is_conversation(given, session):
        converse(engine, given)
        return
    if given.beside is not None:
        _compare(engine, prompts, given, loaded)
        return
    outputs = _answers(engine, prompts, given, context)
    warn_of_unknown_words(asked, engine)
    _warn_of_cut_answers(outputs, given)
    if given.proof_file is not None:
        assert outputs[0].kv_proof is not None, "it was asked for"
        write_proof(given.proof_file, outputs[0].kv_proof, replace=True)
    if given.as_json:
        print_json({**report(outputs, Side.of(engine), loaded), "kernels": engine.kernels})
        return
    if not given.stream:
        _print_answers(outputs)
    kernels = f" | {engine.kernels}" if engine.kernels else ""
    show(summary(outputs, Side.of(engine)) + kernels, err=True)


def _open(given: RunArguments) -> Engine:
    return Engine.open(
        given.engine,
        backend=given.backend,
        threads=given.threads,
        prefill_precision=given.prefill_precision,
        speculate=given.speculate,
        proofs=given.proves,
        sealed=given.sealed,
        progress=progress(),
    )


def _answers(engine: Engine, prompts: Sequence[Any], given: RunArguments, context: Context | None) -> list[Output]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BarePromptWarning)  # the command has warned, unless --raw is given
        if given.prefill_slice_ms is not None:
            slice_ms = given.prefill_slice_ms
            return engine.generate_in_slices(prompts, prefill_slice_ms=slice_ms, context=context, **given.rules)
        if given.stream:
            return _shown(engine.stream(prompts, context=context, **given.rules), engine.session())
        outputs: list[Output] = engine.generate(prompts, context=context, **given.rules)
        return outputs


def _compare(engine: Engine, prompts: Sequence[Any], given: RunArguments, loaded: float) -> None:
    """Print the answers of the engine and of the other side that --beside names."""
    sides = [Side.of(engine), open_beside(given, engine, engine.rows_for(prompts))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BarePromptWarning)
        answers = answer_beside(sides, engine, prompts, given.rules)
    if given.as_json:
        first, second = (report(outputs, side, loaded) for outputs, side in zip(answers, sides, strict=True))
        print_json({**first, "kernels": engine.kernels, "beside": {"policy": sides[1].name, **second}})
        return
    timings = [side.session.timings for side in sides]
    pairs = zip(answers, timings, strict=True)
    show(side_by_side(sides, [(one[0], took.prefill_seconds, took.decode_seconds) for one, took in pairs]))


def _warn_of_cut_answers(outputs: Sequence[Output], given: RunArguments) -> None:
    """Say on stderr which answers ended before their grammar did."""
    for index, output in enumerate(outputs):
        if given.rules["schema"] is not None and output.finish_reason != "stop":
            what = "the answer" if len(outputs) == 1 else f"answer {index}"
            kind = "its JSON" if given.rules["schema"].is_json else "it"
            message = (
                f"{what} ended after {len(output.token_ids)} tokens ({output.finish_reason}): {kind} may be cut off"
            )
            show(
                f"warning: {message}\nhint: a larger --max-new-tokens, or an engine with a larger max_output_len",
                err=True,
            )


def _shown(events: Iterable[Event], session: Session) -> list[Output]:
    outputs = []
    for event in events:
        sys.stdout.write(answer_text(event.text) if session.tokenizer is not None else f"{event.token_id} ")
        sys.stdout.flush()
        if event.output is not None:
            outputs.append(event.output)
    click.echo()
    return outputs


def _print_answers(outputs: list[Output]) -> None:
    for index, output in enumerate(outputs):
        if len(outputs) > 1:
            click.echo(f"{'' if index == 0 else chr(10)}== prompt {index} ==")
        click.echo(" ".join(map(str, output.token_ids)) if output.text is None else answer_text(output.text))
