"""An engine as Python code uses it: open it, ask it, verify it, profile it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from kvc_trt.api.contexts import read_prompt, turn_logits
from kvc_trt.api.conversations import open_conversation
from kvc_trt.api.keywords import check_fields
from kvc_trt.api.memory_plan import memory_plan
from kvc_trt.api.prompts import Messages, chat_ids, prompt_ids
from kvc_trt.api.rules import requests_of
from kvc_trt.backends.opening import open_engine, session_of
from kvc_trt.backends.probes import require_torch
from kvc_trt.backends.registry import backend, runner
from kvc_trt.backends.run_options import DEFAULTS, PrefillPrecision, RunOptions
from kvc_trt.contexts import packing_of, read_context, write_context
from kvc_trt.profile.request import (
    DEFAULT_BATCHES,
    DEFAULT_STEPS,
    ProfileRequest,
    check_contexts,
    default_contexts,
)
from kvc_trt.profile.requests.lengths import Lengths
from kvc_trt.profile.requests.load import Load, LoadSettings
from kvc_trt.profile.run import profile_engine
from kvc_trt.progress import NullProgress, Progress
from kvc_trt.runtime.executor import ClosingExecutor
from kvc_trt.runtime.scheduler.scheduler import Scheduler
from kvc_trt.runtime.speculation.settings import Speculation

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from kvc_trt.accuracy.pages.report import AccuracyReport
    from kvc_trt.api.rules import AnswerRules, PromptRules
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.models import ModelConfig
    from kvc_trt.policies import PolicyParameters
    from kvc_trt.proof import Proof
    from kvc_trt.runtime import Context, Event, Output, Scheduler, Session
    from kvc_trt.runtime.chat.conversation import Conversation
    from kvc_trt.verify.proofs.report import ProofReport
    from kvc_trt.verify.report import Report

StrPath: TypeAlias = "str | PathLike[str]"


class Engine:
    """An engine directory that was checked whole and can be asked, verified and profiled. Make one with `Engine.open`.

    Its executor is loaded at the first question and kept. Not safe for use from several threads.

    >>> from kvc_trt import build
    >>> engine = build("retrieval-tiny", token_budget=64, output="engines/tiny", verify=False)
    >>> with Engine.open("engines/tiny", threads=1) as engine:
    ...     engine.generate("<record> lamp scarlet tiger lagos eight <query> lamp").text
    'scarlet tiger lagos eight'
    """

    def __init__(
        self, directory: EngineDirectory, options: RunOptions = DEFAULTS, *, progress: Progress | None = None
    ) -> None:
        self.directory = directory
        """The checked engine directory: its files, config.json and manifest."""
        if options.backend is not None:
            runner(directory.backend, options.backend)
        self._options = options
        self._progress = progress or NullProgress()
        self._session: Session | None = None

    @classmethod
    def open(
        cls,
        path: StrPath,
        *,
        backend: str | None = None,
        threads: int | None = None,
        prefill_precision: PrefillPrecision = "f32",
        prefix_bytes: int = 0,
        speculate: str | None = None,
        warm_up: bool = False,
        proofs: bool = False,
        sealed: bool = False,
        progress: Progress | None = None,
    ) -> Engine:
        """Check the whole directory and return the engine; nothing is loaded yet.

        `backend` None runs it where it was built for, `threads` None on all cores. `prefill_precision`
        "bf16" computes prefill in bfloat16, faster on processors that multiply it; decode stays in float32.
        `prefix_bytes` is the memory for text that prompts begin with in common (see `share`). `speculate` "ngram", or
        "ngram:4" for drafts of four tokens, checks several tokens at once where the text repeats itself; answers stay
        the same. `warm_up` does the work that the first requests would otherwise wait for (on a GPU, compiling and
        capturing steps). With `proofs`, answers can be asked for with a proof of what the caches kept and read
        (docs/proof.md), which makes the graphs write it out. With `sealed`, the files are copied to memory that nobody
        can write, the engine's size in all (docs/security.md). Raises InputError for an engine that is not intact or
        cannot run there, with the command that rebuilds it.
        """
        directory = open_engine(path, sealed=sealed, progress=progress)
        options = RunOptions(
            backend=backend,
            threads=threads,
            prefill_precision=prefill_precision,
            prefix_bytes=prefix_bytes,
            speculation=None if speculate is None else Speculation.parse(speculate),
            warm_up=warm_up,
            proofs=proofs,
        )
        return cls(directory, options, progress=progress)

    @property
    def backend(self) -> str:
        """The backend that runs it; InputError if none does and none was named."""
        return self._options.backend or runner(self.directory.backend)

    @property
    def kernels(self) -> str | None:
        """The library of the engine's `kvc` operators, such as "native operators (avx512)"; None for their bodies."""
        return backend(self.backend).kernels(self.directory)

    @property
    def path(self) -> Path:
        """Path of the engine directory."""
        return self.directory.path

    @property
    def model(self) -> ModelConfig:
        """The model's configuration."""
        return self.directory.model

    @property
    def parameters(self) -> PolicyParameters:
        """The policy with every number that was derived for this engine."""
        return self.directory.parameters

    def session(self, max_batch_size: int = 1) -> Session:
        """Load the engine's executor, and return a session with at least that many rows.

        `generate` and `stream` use the same one. With it rows can join and leave one by one. Raises
        UnsupportedEnvironment where this machine cannot run the engine.
        """
        if self._session is None:
            self._session = session_of(
                self.directory, self._options, max_batch_size=max_batch_size, progress=self._progress
            )
        elif self._session.max_batch_size < max_batch_size:
            self._session.grow(max_batch_size)
        return self._session

    def scheduler(
        self,
        max_batch_size: int | None = None,
        *,
        prefill_slice_ms: float | None = None,
        queue_limit: int | None = None,
        stay_seconds: float | None = None,
        conversations: bool = True,
        memory_bytes: int | None = None,
    ) -> Scheduler:
        """Return a scheduler over the engine's session, which answers many callers at once; docs/scheduler.md.

        Use it with `with`, or call `start` and `close`; until it is closed, ask nothing of the engine itself.
        `max_batch_size` None is the number of rows that the engine was built for. `memory_bytes` limits what rows and
        one prefill take together; None counts rows alone. `queue_limit` requests may wait, beside one turn for each row
        that is kept. Without `conversations` it starts sooner, and their first
        turn waits longer. None leaves the other settings at their defaults. Raises
        UnsupportedEnvironment where this machine cannot run the engine.
        """
        rows = self.directory.build.max_batch_size if max_batch_size is None else max_batch_size
        session = self.session(rows)
        memory = None if memory_bytes is None else memory_plan(self.directory, self._options, session, memory_bytes)
        settings = {
            "prefill_slice_ms": prefill_slice_ms, "queue_limit": queue_limit, "stay_seconds": stay_seconds,
        }  # fmt: skip
        given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
        return Scheduler(session, max_rows=rows, memory=memory, conversations=conversations, **given)

    def rows_for(self, prompts: Sequence[object]) -> int:
        """Rows that answer these prompts at once: as many as the engine was built for; the others wait."""
        return max(1, min(len(prompts), self.directory.build.max_batch_size))

    @overload
    def generate(
        self,
        prompts: str | Sequence[int],
        **rules: Unpack[PromptRules],
    ) -> Output: ...

    @overload
    def generate(
        self,
        prompts: list[str] | Sequence[Sequence[int]],
        **rules: Unpack[PromptRules],
    ) -> list[Output]: ...

    def generate(
        self,
        prompts: str | Sequence[int] | list[str] | Sequence[Sequence[int]],
        **rules: Unpack[PromptRules],
    ) -> Output | list[Output]:
        """Answer a prompt (text, or token ids); a list of prompts is a batch, and gives a list in its order.

        `rules` are the fields of `PromptRules`; none of them takes the best token at each step, up to the engine's
        max_output_len. An answer ends with `finish_reason` stop (an end token, or one of the texts `stop`), length
        (`max_new_tokens`) or capacity (the cache is full). Raises InputError for any bad prompt before anything runs,
        and while a conversation or a stream of the engine is open.
        """
        ids, is_batch = prompt_ids(self.directory, prompts, continues=rules.get("context") is not None)
        requests = requests_of(ids, rules)
        outputs = self.session(self.rows_for(requests)).generate(requests)
        return outputs if is_batch else outputs[0]

    def generate_in_slices(
        self,
        prompts: list[str] | Sequence[Sequence[int]],
        *,
        prefill_slice_ms: float,
        **rules: Unpack[PromptRules],
    ) -> list[Output]:
        """Answer a batch as `generate` does, under the same `rules`, but let no prompt stop the rows that are answered.

        A scheduler reads each prompt in slices of at most `prefill_slice_ms` milliseconds, with a step of the running
        rows after each. Raises what `generate` raises.
        """
        ids, _ = prompt_ids(self.directory, prompts, continues=rules.get("context") is not None)
        requests = requests_of(ids, rules)
        rows = self.rows_for(requests)
        with self.scheduler(
            rows, prefill_slice_ms=prefill_slice_ms, queue_limit=len(requests), conversations=False
        ) as scheduler:
            tickets = [scheduler.submit(request) for request in requests]
            return [ticket.result() for ticket in tickets]

    def stream(
        self,
        prompts: str | Sequence[int] | list[str] | Sequence[Sequence[int]],
        **rules: Unpack[PromptRules],
    ) -> Iterator[Event]:
        """Yield the answer token by token: `event.text` as it comes, `event.output` with the last token of an answer.

        `event.row` is the prompt's place in a batch. Otherwise like `generate`. An iterator that is left early ends its
        answers when it is closed; until then the engine answers nothing else.
        """
        ids, _ = prompt_ids(self.directory, prompts, continues=rules.get("context") is not None)
        requests = requests_of(ids, rules)
        return _numbered(self.session(self.rows_for(requests)).stream(requests))

    def context(self, prompt: str | Sequence[int], *, context: Context | None = None) -> Context:
        """Read a prompt (text, or token ids) and return what its caches hold, compressed by the policy.

        With `context`, the prompt continues that one. `generate` and `stream` start from a context without computing
        its tokens again. Raises InputError as they do.
        """
        return read_prompt(self.directory, self.session, prompt, context)

    def turn_logits(self, text: str | Sequence[int], *, context: Context) -> NDArray[np.float32]:
        """Read a text (or token ids) that continues a stored one as a turn; return the logits [tokens, vocab] after it.

        Row i is of what follows the text's token i; `context.logits` is of its first token. So likelihoods of an answer
        take one pass. Raises InputError for an engine that was built without `all_logits`, and as `generate` does.
        """
        return turn_logits(self.directory, self.session, text, context)

    def share(self, context: Context) -> None:
        """Let every later prompt that begins with this context's text start from it; `reused_tokens` says that one did.

        The least recently used make room within `prefix_bytes`. A policy that evicts has not seen what follows, which
        can cost answers; where it keeps and reads everything, prompts are shared by themselves. Raises InputError for
        another engine's context, and for one larger than `prefix_bytes`.
        """
        self.session().contexts.share(context)

    def save_context(self, context: Context, path: StrPath, *, replace: bool = False) -> None:
        """Write a context to a file, whole or not at all; with `replace` over an old one."""
        write_context(Path(path), context, replace=replace)

    def load_context(self, path: StrPath) -> Context:
        """Read a context that an engine of the same weights and settings has saved.

        Raises InputError for a file that is damaged or was changed, and for another engine's or policy's context.
        """
        return read_context(Path(path), packing_of(self.directory))

    @overload
    def chat_prompt(self, messages: str | Messages, *, system: str | None = None) -> list[int]: ...

    @overload
    def chat_prompt(self, messages: Sequence[Messages], *, system: str | None = None) -> list[list[int]]: ...

    def chat_prompt(
        self, messages: str | Messages | Sequence[Messages], *, system: str | None = None
    ) -> list[int] | list[list[int]]:
        """Return the token ids that the model's chat template makes of messages, ready for `generate` and `stream`.

        A message is a mapping with `role` (system, user, assistant or tool) and `content`; a text is one message of the
        user, and a list of conversations is a batch. `system` becomes the first message. Raises InputError for a model
        without a chat template, and for messages that it refuses.
        """
        ids, is_batch = chat_ids(self.directory, messages, system)
        return ids if is_batch else ids[0]

    @overload
    def chat(
        self,
        messages: str | Messages,
        *,
        system: str | None = None,
        **rules: Unpack[AnswerRules],
    ) -> Output: ...

    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        *,
        system: str | None = None,
        **rules: Unpack[AnswerRules],
    ) -> list[Output]: ...

    def chat(
        self,
        messages: str | Messages | Sequence[Messages],
        *,
        system: str | None = None,
        **rules: Unpack[AnswerRules],
    ) -> Output | list[Output]:
        """Answer messages (see `chat_prompt`) as the model was trained to; otherwise like `generate`.

        `stream(engine.chat_prompt(messages))` gives the same answer token by token.
        """
        ids, is_batch = chat_ids(self.directory, messages, system)
        requests = requests_of(ids, rules)
        outputs = self.session(self.rows_for(requests)).generate(requests)
        return outputs if is_batch else outputs[0]

    def conversation(
        self,
        *,
        system: str | None = None,
        document: str | None = None,
        **rules: Unpack[AnswerRules],
    ) -> Conversation:
        """Return a conversation to `ask` question after question. Each one costs a single pass over the new tokens.

        `system` is its first message, and `document` a text before the first question, which is read once and stays
        through `clear`; the other arguments are those of `generate`, for every answer. Until it is closed, ask nothing
        of the engine itself. Raises InputError for an engine without a chat template, or one that takes no turns, with
        the command that builds it again.
        """
        return open_conversation(
            self.directory, self.session(), system=system, document=document, rules=rules, progress=self._progress
        )

    def verify(
        self,
        level: str = "quick",
        *,
        kernels: StrPath | None = None,
        steps: int | None = None,
        samples: int | None = None,
        checkpoint: StrPath | None = None,
        seed: int = 0,
        directory: StrPath | None = None,
    ) -> Report:
        """Check the engine against the PyTorch reference.

        `level` is quick, full, ops, codes, logits, tokens or retrieval. A failed check is in the report (`passed`,
        `failures`, `as_text()`, `to_json()`), not raised. `kernels` is the library for an engine that torch runs;
        `checkpoint` a Hugging Face directory or GGUF file, to say what the engine's weight format costs. `level`
        tensors compares executors tensor by tensor with NVIDIA Polygraphy, and writes its files to `directory`. Raises
        InputError, and UnsupportedEnvironment without PyTorch, or Polygraphy. The result is recorded in the engine's
        directory, where `kvc-trt inspect` reads it.
        """
        require_torch()
        from kvc_trt.api.verification import VerifyRequest, verify_engine

        asked = VerifyRequest(level, as_path(kernels), steps, samples, as_path(checkpoint), seed, as_path(directory))
        return verify_engine(self.directory, replace(self._options, backend=self.backend), asked, self._progress)

    def replay(self, proof: Proof | StrPath) -> ProofReport:
        """Check a KV proof, or the file of one, against the PyTorch reference, which reads the same tokens.

        Claims that do not hold are listed in the report (`passed`, `problems`, `as_text()`, `to_json()`), not raised.
        Raises InputError for a file that is no proof or is of another engine, and UnsupportedEnvironment without
        PyTorch.
        """
        require_torch()
        from kvc_trt.api.verification import replay

        return replay(self.directory, proof, self._progress)

    def measure_accuracy(self, *, kernels: StrPath | None = None, **asked: Any) -> AccuracyReport:
        """Ask the engine generated questions beside its dense twin: what the policy costs in answers.

        `asked` are the fields of `kvc_trt.AccuracyRequest`. Bars that do not hold are in the report, not raised.
        TypeError for an unknown keyword.
        """
        from kvc_trt.accuracy.request import AccuracyRequest, measure_engine

        check_fields(asked, AccuracyRequest, "kernels")
        request = AccuracyRequest(**asked)
        return measure_engine(self.directory, self.backend, request, kernels=as_path(kernels), progress=self._progress)

    def profile(
        self,
        *,
        contexts: Iterable[int] | None = None,
        batches: Iterable[int] | None = None,
        steps: int = DEFAULT_STEPS,
        decode_seconds: float = 20.0,
        prefills: int = 3,
        prefill_seconds: float = 60.0,
    ) -> dict[str, Any]:
        """Measure the engine beside its dense twin and the floor of a measured copy bandwidth.

        `contexts` are prompt lengths (None: max_input_len and its halves), `batches` numbers of rows (None: 1 and 8).
        A row's decode ends after `steps` steps or `decode_seconds`; time to first token is left out where one prefill
        would take longer than `prefill_seconds`. The result holds plain values: times in milliseconds, sizes in bytes.
        Raises InputError, and UnsupportedEnvironment where nothing measures engines of this backend.
        """
        request = ProfileRequest(
            contexts=check_contexts(
                tuple(contexts or default_contexts(self.parameters)), self.parameters, self.directory.model
            ),
            batches=tuple(sorted(set(batches or DEFAULT_BATCHES))),
            steps=steps,
            decode_seconds=decode_seconds,
            prefills=prefills,
            prefill_seconds=prefill_seconds,
            options=self._options,
        )
        return profile_engine(self.directory, request, self._progress)

    def profile_requests(
        self,
        requests: int,
        *,
        input_len: str | int | None = None,
        output_len: str | int | None = None,
        data: StrPath | None = None,
        **load: Unpack[LoadSettings],
    ) -> dict[str, Any]:
        """Answer many requests at once with the engine, and with its dense twin in the same memory.

        `input_len` and `output_len` are N, "MIN:MAX" or "normal:MEAN,STD" tokens (None: the engine's longest); `data`
        is a file of prompts (docs/data.md) in place of random token ids. `load` are the other fields of
        `kvc_trt.profile.requests.load.Load`, such as `concurrency`. The result holds plain values under the names of
        `vllm bench serve`: latencies in milliseconds, rates per second, sizes in bytes (docs/profile.md). Raises
        InputError, UnsupportedEnvironment where the caches do not fit into memory, and a request's own error.
        """
        from kvc_trt.profile.requests.run import profile_requests

        asked = Load(
            requests,
            input_len=None if input_len is None else Lengths.parse(input_len),
            output_len=None if output_len is None else Lengths.parse(output_len),
            data=as_path(data),
            **load,
        )
        return profile_requests(self.directory, asked, self._progress, self._options)

    def close(self) -> None:
        """Release the executor and the engine's files. The next question checks the files that it needs and loads them
        again."""
        session, self._session = self._session, None
        self.directory.close()
        if session is not None and isinstance(session.executor, ClosingExecutor):
            session.executor.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __repr__(self) -> str:
        backend = self._options.backend or self.directory.backend
        return f"Engine({str(self.path)!r}, policy={self.parameters.policy!r}, backend={backend!r})"


def as_path(path: StrPath | None) -> Path | None:
    """Return the path as an object; None stays None."""
    return None if path is None else Path(path)


def _numbered(events: Generator[tuple[int, Event], None, None]) -> Iterator[Event]:
    with contextlib.closing(events):
        for index, event in events:
            yield replace(event, row=index)
