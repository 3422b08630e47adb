"""`Engine.verify` and `Engine.replay`: an engine, or a proof of its answers, against the PyTorch reference.

Needs PyTorch from the first line on, so it is imported where one of them is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from kvc_trt.errors import InputError
from kvc_trt.proof import Proof, read_proof
from kvc_trt.verify.ladder import verify
from kvc_trt.verify.proofs.replay import replay_proof
from kvc_trt.verify.recording import record_report
from kvc_trt.verify.rungs.tensors import check_settings, verify_tensors

if TYPE_CHECKING:
    from kvc_trt.backends.run_options import RunOptions
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.progress import Progress
    from kvc_trt.verify.proofs.report import ProofReport
    from kvc_trt.verify.report import Report


@dataclass(frozen=True)
class VerifyRequest:
    """The arguments of `Engine.verify`."""

    level: str
    kernels: Path | None
    steps: int | None
    samples: int | None
    checkpoint: Path | None
    seed: int
    directory: Path | None


def verify_engine(engine: EngineDirectory, options: RunOptions, asked: VerifyRequest, progress: Progress) -> Report:
    """Verify an engine on the backend of `options`; reports of all levels but tensors are recorded in its directory."""
    if asked.level == "tensors":
        check_settings(samples=asked.samples, checkpoint=asked.checkpoint)
        assert options.backend is not None
        return verify_tensors(
            engine,
            backend=options.backend,
            kernels=asked.kernels,
            directory=asked.directory,
            steps=asked.steps,
            seed=asked.seed,
            progress=progress,
        )
    if asked.directory is not None:
        raise InputError(f"directory goes with level tensors, found level {asked.level}")
    report = verify(
        engine,
        options,
        level=asked.level,
        kernels=asked.kernels,
        steps=asked.steps,
        samples=asked.samples,
        checkpoint=asked.checkpoint,
        seed=asked.seed,
        progress=progress,
    )
    record_report(engine, report)
    return report


def replay(engine: EngineDirectory, proof: Proof | str | PathLike[str], progress: Progress) -> ProofReport:
    """Check a KV proof of an engine's answer, or the file of one."""
    given = proof if isinstance(proof, Proof) else read_proof(Path(proof))
    source = "the proof" if isinstance(proof, Proof) else str(proof)
    return replay_proof(engine, given, source, progress)
