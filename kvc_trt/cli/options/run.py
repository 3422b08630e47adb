"""The command line of `kvc-trt run`: which options go together, and the prompts that they give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvc_trt.backends.run_options import PrefillPrecision
from kvc_trt.cli.options.prompts import PromptOptions, read_prompts
from kvc_trt.files.atomic import check_new_file

END = "/exit"
"""The line that ends a conversation."""
FROM_INPUT = "\0"
"""Stands for --chat without a text; no argument of a process can be this."""


@dataclass(frozen=True)
class RunArguments:
    """Every argument and option, by its parameter's name."""

    engine: Path
    prompt: str | None
    prompt_file: Path | None
    prompt_ids: Path | None
    chat: str | None
    messages: Path | None
    document: Path | None
    system: str | None
    raw: bool
    context: Path | None
    beside: str | None
    rules: dict[str, Any]
    """The rules of the answer, as `Engine.generate` takes them."""
    stream: bool
    proof_file: Path | None
    backend: str | None
    threads: int | None
    sealed: bool
    prefill_slice_ms: float | None
    prefill_precision: PrefillPrecision
    speculate: str | None
    as_json: bool

    @property
    def proves(self) -> bool:
        """True if the answer gets a KV proof."""
        return self.rules["kv_proof"] is not None

    @property
    def questions_follow(self) -> bool:
        """True if all questions are read from standard input."""
        return self.chat == FROM_INPUT

    def prompts(self) -> PromptOptions:
        """Read the prompts; UsageError for options that exclude each other, before any engine is loaded."""
        for is_wrong, message in _WRONG:
            if is_wrong(self):
                raise click.UsageError(message)
        prompts = self._read()
        if self.proof_file is not None:
            if len(prompts) > 1:
                raise click.UsageError(
                    f"-o holds the proof of one answer, found {len(prompts)} prompts; --json has them all"
                )
            check_new_file(self.proof_file, replace=True)
        if (self.stream or (self.beside and not self.as_json)) and len(prompts) > 1:
            source, option = self.prompt_ids or self.messages, "--stream" if self.stream else "--beside"
            raise click.UsageError(f"{option} shows one answer, found {len(prompts)} prompts in {source}")
        return prompts

    def _read(self) -> PromptOptions:
        text, files = self.prompt, (self.prompt_file, self.prompt_ids)
        if self.context is not None and text is None and files == (None, None):
            text = ""  # the answer alone continues the stored text
        # Where all questions follow, any text shows whether the other options agree with --chat.
        question = "?" if self.questions_follow else self.chat
        return read_prompts(text, *files, question, self.messages, document=self.document, system=self.system)


def _proof_has_no_place(given: RunArguments) -> bool:
    if given.proves and given.as_json:
        return False
    return given.proves != (given.proof_file is not None)


def _chats_after_a_context(given: RunArguments) -> bool:
    chats = (given.chat, given.messages, given.document, given.system)
    return given.context is not None and chats != (None, None, None, None)


def _beside_has_no_place(given: RunArguments) -> bool:
    others = (given.context is not None, given.stream, given.proves, given.prefill_slice_ms is not None)
    return given.beside is not None and any(others)


_WRONG: tuple[tuple[Callable[[RunArguments], bool], str], ...] = (
    (lambda given: given.stream and given.as_json, "--stream and --json exclude each other"),
    (lambda given: given.rules["logprobs"] is not None and not given.as_json, "--logprobs goes with --json"),
    (_proof_has_no_place, "--kv-proof goes with -o FILE or --json, and -o with --kv-proof"),
    (
        _chats_after_a_context,
        "--context goes with --prompt, --prompt-file or --prompt-ids, or with none of them",
    ),
    (
        lambda given: given.proves and given.questions_follow,
        "--kv-proof proves one answer: give the question with --chat TEXT",
    ),
    (
        _beside_has_no_place,
        "--beside shows two whole answers to a prompt: it excludes --context, --stream, --kv-proof, --prefill-slice-ms",
    ),
    (
        lambda given: given.prefill_slice_ms is not None and (given.stream or given.questions_follow),
        "--prefill-slice-ms goes with a batch of prompts, which is neither streamed nor typed",
    ),
)
"""Combinations of options that are refused, each with its message."""
