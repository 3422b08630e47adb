"""The dense twin of an engine, made runnable: same weights file, same lengths, nothing evicted, everything read.

Verification and profiling run it beside the engine, so that a difference is the compression and nothing else.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from kvc_trt.engine.directory import DECODE_FILE, PREFILL_FILE, WEIGHTS_FILE, Engine
from kvc_trt.engine.files import disk_error


def dense_twin(engine: Engine, directory: Path, *, max_input_len: int | None = None) -> Engine:
    """Write the twin of a checked engine into `directory` (which exists and is empty) and return it.

    `max_input_len` (at most the engine's) makes a twin for shorter prompts: its caches are no longer than they need to
    be, as those of a dense engine built for that length.

    The weights are not copied where a hard link can stand for them; elsewhere one copy is made, because an executor
    refuses symbolic links. The result has no manifest of its own: it lives as long as its maker needs it. Raises
    UnsupportedEnvironment when the disk is full.
    """
    import onnx

    from kvc_trt.graph.state import state_tensors
    from kvc_trt.graph.twin import build_twin_decode, build_twin_prefill, twin_parameters
    from kvc_trt.graph.weights import GraphWeights

    lengths = engine.parameters.max_input_len if max_input_len is None else max_input_len
    origin = dataclasses.replace(engine.parameters, max_input_len=lengths)
    parameters = twin_parameters(origin)
    try:
        _link_or_copy(engine.weights_path, directory / WEIGHTS_FILE)
        weights = GraphWeights(directory / WEIGHTS_FILE)
        for name, build in ((PREFILL_FILE, build_twin_prefill), (DECODE_FILE, build_twin_decode)):
            onnx.save(build(engine.model, origin, weights=weights), directory / name)
    except OSError as error:
        raise disk_error(error, f"writing the dense twin of {engine.path}") from error
    state = [dataclasses.asdict(tensor) for tensor in state_tensors(engine.model, parameters, weights.dtype)]
    compression = {**engine.config["kv_compression"], "parameters": dataclasses.asdict(parameters), "state": state}
    config = {**engine.config, "kv_compression": compression}
    return dataclasses.replace(engine, path=directory, config=config, parameters=parameters)


@contextmanager
def temporary_twin(engine: Engine, *, max_input_len: int | None = None) -> Iterator[Engine]:
    """The twin of `engine` for as long as the block runs: beside the engine where that can be written, else in /tmp."""
    beside = engine.path.absolute().parent
    parent = beside if os.access(beside, os.W_OK) else None
    with TemporaryDirectory(prefix=f".{engine.path.name}.twin-", dir=parent) as directory:
        yield dense_twin(engine, Path(directory), max_input_len=max_input_len)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source.absolute(), target)
    except OSError:
        shutil.copyfile(source, target)
