"""`kvc-trt run`: answer prompts with an engine."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import cloup

from kvc_trt.atomic_files import check_new_file
from kvc_trt.backends.registry import names
from kvc_trt.backends.run_options import PrefillPrecision
from kvc_trt.cli.answer_options import answer_options, take_rules
from kvc_trt.cli.conversation import END, converse, on_terminal
from kvc_trt.cli.option_types import PREFILL_PRECISION
from kvc_trt.cli.prompts import read_prompts, warn_of_bare_text
from kvc_trt.cli.text.printing import json_option, print_json, progress
from kvc_trt.cli.text.run_report import report, summary
from kvc_trt.errors import BarePromptWarning

if TYPE_CHECKING:
    from kvc_trt.runtime import Event, Output, Session

FROM_INPUT = "\0"
"""Stands for --chat without a text; no argument of a process can be this."""
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
        f"are read line by line and answered as turns, until the end of the input or {END}.",
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
        "--document", type=click.Path(path_type=Path), help="A UTF-8 text file that --chat asks about; it comes first."
    ),
    cloup.option("--system", metavar="TEXT", help="The system message before --chat or --messages."),
    cloup.option("--raw", is_flag=True, help="Give a chat model the text as it is, without a warning."),
)
@cloup.option_group(
    "Start",
    cloup.option(
        "--context",
        type=click.Path(path_type=Path),
        help="A file of kvc-trt context save. A prompt continues its text; without one the answer does.",
    ),
)
@cloup.option_group(
    "Answer",
    cloup.option("--stream", is_flag=True, help="Print the text as it comes."),
    *answer_options(),
    cloup.option("-o", "--output", "proof_file", type=click.Path(path_type=Path), help="The file of --kv-proof."),
)
@cloup.option_group(
    "Engine",
    cloup.option(
        "--backend",
        type=click.Choice(names()),
        help="What runs it; torch: its weights in PyTorch, on a GPU where there are CUDA kernels (KVC_TRT_KERNELS, "
        "or the package's own), else on the CPU, slowly.  [default: what it was built for]",
    ),
    cloup.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: all cores]"),
    cloup.option(
        "--prefill-slice-ms",
        type=click.FloatRange(min=0, min_open=True),
        metavar="MS",
        help="Read the prompts of a batch one by one, in slices of at most so many milliseconds, with a step of the "
        "rows that are being answered after each.  [default: together, at once]",
    ),
    PREFILL_PRECISION,
    cloup.option(
        "--speculate",
        metavar="ngram[:TOKENS]",
        help="Check drafts of that many tokens at once, where the text repeats itself; answers stay the same. "
        "Needs an engine built with --draft-tokens.",
    ),
)
@json_option
def command(
    engine: Path,
    prompt: str | None,
    prompt_file: Path | None,
    prompt_ids: Path | None,
    chat: str | None,
    messages: Path | None,
    document: Path | None,
    system: str | None,
    raw: bool,
    context: Path | None,
    stream: bool,
    proof_file: Path | None,
    backend: str | None,
    threads: int | None,
    prefill_slice_ms: float | None,
    prefill_precision: PrefillPrecision,
    speculate: str | None,
    as_json: bool,
    **parameters: Any,
) -> None:
    """Answer the prompt with the engine in directory ENGINE.

    The text goes to stdout, a summary to stderr. An answer ends with reason stop (an end token or --stop), length
    (--max-new-tokens) or capacity (the cache is full, or the engine's last position is reached). Without --temperature
    the best token is always taken, whatever a model's generation_config.json says of sampling.

    With --chat alone, each line of standard input is a question, and its answer costs one pass over what is new of the
    conversation; --json prints a line of JSON for each.
    """
    from kvc_trt import Engine
    from kvc_trt.proof import write_proof
    from kvc_trt.runtime.session.turn import takes_turns

    rules = take_rules(parameters)
    kv_proof = rules["kv_proof"]
    if stream and as_json:
        raise click.UsageError("--stream and --json exclude each other")
    if rules["logprobs"] is not None and not as_json:
        raise click.UsageError("--logprobs goes with --json")
    if (kv_proof is None) != (proof_file is None) and not (kv_proof and as_json):
        raise click.UsageError("--kv-proof goes with -o FILE or --json, and -o with --kv-proof")
    if context is None:
        # Without a question, that the options agree is all that is wanted.
        said = "?" if chat == FROM_INPUT else chat
        asked = read_prompts(prompt, prompt_file, prompt_ids, said, messages, document=document, system=system)
    else:
        if chat is not None or messages is not None or document is not None or system is not None:
            raise click.UsageError("--context goes with --prompt, --prompt-file or --prompt-ids, or with none of them")
        none = prompt is None and prompt_file is None and prompt_ids is None
        asked = read_prompts("" if none else prompt, prompt_file, prompt_ids, None, None, document=None, system=None)
    if kv_proof is not None and chat == FROM_INPUT:
        raise click.UsageError("--kv-proof is of one answer: give the question, --chat TEXT")
    if prefill_slice_ms is not None and (stream or chat == FROM_INPUT):
        raise click.UsageError("--prefill-slice-ms goes with a batch of prompts, which is neither streamed nor typed")
    if proof_file is not None:
        if len(asked) > 1:
            raise click.UsageError(f"-o holds the proof of one answer, found {len(asked)} prompts; --json has them all")
        check_new_file(proof_file, replace=True)
    if stream and len(asked) > 1:
        raise click.UsageError(f"--stream shows one answer, found {len(asked)} prompts in {prompt_ids or messages}")

    started = time.perf_counter()
    opened = Engine.open(
        engine,
        backend=backend,
        threads=threads,
        prefill_precision=prefill_precision,
        speculate=speculate,
        proofs=kv_proof is not None,
        progress=progress(),
    )
    prompts = asked.for_engine(opened)
    start = None if context is None else opened.load_context(context)
    if start is None and not raw:
        warn_of_bare_text(asked, opened, BARE_PROMPT_HINT)
    session = opened.session(opened.rows_for(prompts))
    loaded = time.perf_counter() - started
    goes_on = on_terminal() and not as_json and kv_proof is None and takes_turns(session.executor)
    if chat is not None and (chat == FROM_INPUT or goes_on):
        first = None if chat == FROM_INPUT else chat
        converse(opened, opened.conversation(system=system, **rules), first, document, as_json=as_json)
        return
    rules["context"] = start
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BarePromptWarning)  # it is said already, unless --raw is given
        if prefill_slice_ms is not None:
            outputs = opened.generate_in_slices(prompts, prefill_slice_ms=prefill_slice_ms, **rules)
        elif stream:
            outputs = _shown(opened.stream(prompts, **rules), session)
        else:
            outputs = opened.generate(prompts, **rules)
    if proof_file is not None:
        assert outputs[0].kv_proof is not None, "it was asked for"
        write_proof(proof_file, outputs[0].kv_proof, replace=True)
    if as_json:
        print_json({**report(outputs, opened, loaded), "kernels": opened.kernels})
        return
    if not stream:
        _print_answers(outputs)
    kernels = f" | {opened.kernels}" if opened.kernels else ""
    click.echo(summary(outputs, opened) + kernels, err=True)


def _shown(events: Iterable[Event], session: Session) -> list[Output]:
    outputs = []
    for event in events:
        sys.stdout.write(event.text if session.tokenizer is not None else f"{event.token_id} ")
        sys.stdout.flush()
        if event.output is not None:
            outputs.append(event.output)
    click.echo()
    return outputs


def _print_answers(outputs: list[Output]) -> None:
    for index, output in enumerate(outputs):
        if len(outputs) > 1:
            click.echo(f"{'' if index == 0 else chr(10)}== prompt {index} ==")
        click.echo(" ".join(map(str, output.token_ids)) if output.text is None else output.text)
