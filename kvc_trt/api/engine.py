"""An engine as Python code uses it: open it, ask it, verify it, profile it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvc_trt.api.asked import AskedEngine
from kvc_trt.api.opened import StrPath, as_path
from kvc_trt.errors import InputError
from kvc_trt.profile.request import (
    DEFAULT_BATCHES,
    DEFAULT_STEPS,
    ProfileRequest,
    check_contexts,
    default_contexts,
)

if TYPE_CHECKING:
    from kvc_trt.accuracy.pages.report import AccuracyReport
    from kvc_trt.proof import Proof
    from kvc_trt.verify.proofs.report import ProofReport
    from kvc_trt.verify.report import Report


class Engine(AskedEngine):
    """An engine directory that was checked whole and can be asked, verified and profiled. Make one with `Engine.open`.

    What runs it is loaded at the first question and kept. Not safe for use from several threads.

    >>> from kvc_trt import build
    >>> engine = build("retrieval-tiny", token_budget=64, output="engines/tiny", verify=False)
    >>> with Engine.open("engines/tiny", threads=1) as engine:
    ...     engine.generate("<record> lamp scarlet tiger lagos eight <query> lamp").text
    'scarlet tiger lagos eight'
    """

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
        """Check the engine against the PyTorch reference: `level` is quick, full, ops, logits, tokens or retrieval.

        A failed check is in the report (`passed`, `failures`, `as_text()`, `to_json()`), not raised. `kernels` is the
        library for an engine that torch runs; `checkpoint` a Hugging Face directory or GGUF file, to say what the
        engine's weight format costs. `level` tensors compares executors tensor by tensor with NVIDIA Polygraphy, and
        writes its files to `directory`. Raises InputError, and UnsupportedEnvironment without PyTorch, or Polygraphy.
        """
        from kvc_trt.verify import require_torch

        require_torch()
        if level == "tensors":
            from kvc_trt.verify.rungs.tensors import check_settings, verify_tensors

            check_settings(samples=samples, checkpoint=checkpoint)
            return verify_tensors(
                self.directory,
                backend=self.backend,
                kernels=as_path(kernels),
                directory=as_path(directory),
                steps=steps,
                seed=seed,
                progress=self._progress,
            )
        if directory is not None:
            raise InputError(f"directory goes with level tensors, found level {level}")
        from kvc_trt.verify.ladder import verify

        return verify(
            self.directory,
            level=level,
            backend=self.backend,
            kernels=as_path(kernels),
            steps=steps,
            samples=samples,
            checkpoint=as_path(checkpoint),
            seed=seed,
            prefill_precision=self._prefill_precision,
            progress=self._progress,
        )

    def replay(self, proof: Proof | StrPath) -> ProofReport:
        """Check a KV proof, or the file of one, against the PyTorch reference, which reads the same tokens.

        What is not true of it is in the report (`passed`, `problems`, `as_text()`, `to_json()`), not raised. Raises
        InputError for a file that is no proof or is of another engine, and UnsupportedEnvironment without PyTorch.
        """
        from kvc_trt.proof import Proof, read_proof
        from kvc_trt.verify import require_torch

        require_torch()
        from kvc_trt.verify.proofs.replay import replay_proof

        given = proof if isinstance(proof, Proof) else read_proof(Path(proof))
        source = "the proof" if isinstance(proof, Proof) else str(proof)
        return replay_proof(self.directory, given, source, self._progress)

    def measure_accuracy(self, *, kernels: StrPath | None = None, **asked: Any) -> AccuracyReport:
        """Ask the engine generated questions beside its dense twin: what the policy costs in answers.

        `asked` are the fields of `kvc_trt.AccuracyRequest`. Bars that do not hold are in the report, not raised.
        """
        from kvc_trt.accuracy.request import AccuracyRequest, measure_engine
        from kvc_trt.verify import require_torch

        require_torch()
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
        from kvc_trt.machine import usable_cores
        from kvc_trt.profile.run import profile_engine

        request = ProfileRequest(
            contexts=check_contexts(tuple(contexts or default_contexts(self.parameters)), self.parameters),
            batches=tuple(sorted(set(batches or DEFAULT_BATCHES))),
            steps=steps,
            decode_seconds=decode_seconds,
            prefills=prefills,
            prefill_seconds=prefill_seconds,
            threads=self._threads or usable_cores(),
            prefill_precision=self._prefill_precision,
        )
        return profile_engine(self.directory, request, self._progress)
