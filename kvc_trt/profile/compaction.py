"""What compaction costs: the KvcCompact nodes of a prefill, in a session that records ONNX Runtime's own profile."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from kvc_trt.profile.attribution import FunctionTime, function_times
from kvc_trt.profile.subject import Subject, random_prompts

OPERATOR = "KvcCompact"


def time_compaction(subject: Subject, rows: int, context: int, repeats: int) -> FunctionTime | None:
    """A prefill of `rows` prompts of `context` tokens: its length and its KvcCompact nodes, seconds.

    Of `repeats` prefills the one with the median share is returned. None for an engine whose graph compacts nothing.
    Recording costs time, so only the share of the run is of use.
    """
    from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor

    program, parameters = subject.program, subject.parameters
    if not any(parameters.is_compressed(layer) for layer in range(program.model.num_hidden_layers)):
        return None
    prompts = random_prompts(rows, context, program.model.vocab_size)
    with TemporaryDirectory() as directory:
        executor = OnnxRuntimeExecutor(program, threads=subject.threads, profile=Path(directory))
        profiled = Subject(subject.name, program, executor, subject.threads, subject.bench)
        profiled.prefill_seconds(prompts[:, :1])  # starts threads and allocates, outside of the run that counts
        for _ in range(repeats):
            profiled.prefill_seconds(prompts)
        recorded = function_times(executor.end_profiling()["prefill"], OPERATOR)[1:]
    return sorted(recorded, key=lambda time: time.share)[len(recorded) // 2]
