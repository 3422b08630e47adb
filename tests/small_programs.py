"""Programs of small random models under the policies of `tests.every_policy`, written once for all test processes.

Other tests read the lent files at the same time: a test that writes to a file, or that needs one which nobody else
has mapped, takes a copy (`copied`).
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvc_trt.engine.program import Program
from kvc_trt.files.held import HeldFile
from kvc_trt.graph.state import state_tensors
from kvc_trt.graph.weights import GraphWeights, write_weights
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.random_weights import RandomWeights
from tests.every_policy import parameters_of
from tests.small_model import SMALL


class SmallPrograms:
    """Programs in `folder`, which every test process of a session names alike; whoever asks first writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._digests: dict[Path, str] = {}

    def __call__(
        self,
        name: str,
        precision: str = "fp32",
        *,
        model: ModelConfig = SMALL,
        graphs: bool = True,
        turns: bool = False,
        all_logits: bool = False,
        draft_tokens: int = 0,
        **changes: Any,
    ) -> Program:
        """The program of a name of `tests.every_policy`, with `changes` to its settings, in a precision of weights.

        With `turns`, and with `draft_tokens`, it has what its policy needs for them, where the policy takes them.
        Without `graphs` none is written: PyTorch reads weights alone, and takes a graph's name for the answer that
        there is one.
        """
        parameters = parameters_of(name, model, **changes)
        turns = turns and parameters.no_turn is None
        drafts = draft_tokens if parameters.no_drafts is None else 0
        length = parameters.max_sequence_len
        folder = self.folder / _digest(model.identity, precision, length)
        with _alone_in(folder):
            weights = self._written(
                folder / "weights.safetensors",
                lambda path: write_weights(model, RandomWeights(model, 0), path, weights=precision, length=length),
            )
            stored = GraphWeights(weights)

            def graph(kind: str, **options: Any) -> HeldFile:
                path = folder / f"{kind}-{_digest(parameters, options)}.onnx"
                if not graphs:
                    return HeldFile(path)
                write = partial(_write_graph, kind=kind, model=model, parameters=parameters, weights=stored)
                return HeldFile(self._written(path, partial(write, options=options)))

            return Program(
                model,
                parameters,
                state_tensors(model, parameters, stored.dtype, turns=turns),
                HeldFile(weights),
                graph("prefill", turns=turns),
                graph("decode"),
                graph("extend", all_logits=all_logits) if turns else None,
                all_logits,
                graph("draft", tokens=1 + drafts) if drafts else None,
                drafts,
            )

    def changed(self) -> list[Path]:
        """Return the files that this process wrote and that have changed since."""
        return [path for path, digest in self._digests.items() if _sha256(path) != digest]

    def _written(self, path: Path, write: Callable[[Path], object]) -> Path:
        if not path.exists():
            write(path)
            self._digests[path] = _sha256(path)
        return path


def copied(program: Program, folder: Path) -> Program:
    """Return the program in files of its own."""
    graphs = {name: getattr(program, name) for name in ("prefill", "decode", "extend", "draft")}
    mine = {name: HeldFile(shutil.copy(graph.path, folder)) for name, graph in graphs.items() if graph is not None}
    return replace(program, weight_file=HeldFile(shutil.copy(program.weight_file.path, folder)), **mine)


def _write_graph(
    path: Path,
    kind: str,
    model: ModelConfig,
    parameters: PolicyParameters,
    weights: GraphWeights,
    options: dict[str, Any],
) -> None:
    import onnx  # nothing else here needs it, and a machine that compares kernels may lack it

    from kvc_trt.graph import build

    onnx.save(getattr(build, f"build_{kind}")(model, parameters, weights=weights, **options), path)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """No other process writes in the folder during the block."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _digest(*values: object) -> str:
    """Return a name for values whose texts say all that they are."""
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
