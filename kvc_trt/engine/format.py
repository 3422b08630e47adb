"""What an engine directory consists of: the files of every engine, and those of its backend.

Checking and inspecting needs only the directory: an engine for a GPU can be inspected on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

CONFIG_FILE, PREFILL_FILE, DECODE_FILE = "config.json", "prefill.onnx", "decode.onnx"
EXTEND_FILE, DRAFT_FILE = "extend.onnx", "draft.onnx"
WEIGHTS_FILE, TOKENIZER_DIRECTORY = "weights.safetensors", "tokenizer"

GRAPH_FILES = {"weights": WEIGHTS_FILE, "prefill": PREFILL_FILE, "decode": DECODE_FILE}
"""Stage -> file, for the files that every engine has."""
EVERY_GRAPH = {**GRAPH_FILES, "extend": EXTEND_FILE, "draft": DRAFT_FILE}
"""Stage -> file, for a backend that also runs turns of a conversation and checks drafts."""
_OPTIONAL = ("extend", "draft")
"""Some policies take no turns, drafts are checked by engines that were asked for, and older engines have neither."""


class EngineFormat(Protocol):
    """The directory format of one backend's engines."""

    @property
    def name(self) -> str:
        """The backend's name in config.json."""

    @property
    def files(self) -> Mapping[str, str]:
        """Stage -> the file it makes, in order; each stage may read the files of earlier ones."""

    def target_problem(self, target: Any) -> str | None:
        """Return what is wrong with a manifest's `target`, or None."""


def required_files(format: EngineFormat) -> tuple[str, ...]:
    """Return the files that an engine of this format must have."""
    return CONFIG_FILE, *(file for stage, file in format.files.items() if _graph_of(stage) not in _OPTIONAL)


def files_of_turns(format: EngineFormat) -> tuple[str, ...]:
    """Return the files that an engine of this format has if it takes turns: all of them or none."""
    return tuple(file for stage, file in format.files.items() if _graph_of(stage) == "extend")


def _graph_of(stage: str) -> str:
    return stage.partition(".")[0]


def entries(formats: Iterable[EngineFormat]) -> frozenset[str]:
    """Return every name that an engine directory of any of the formats may hold besides its manifest."""
    files = (file.split("/")[0] for format in formats for file in format.files.values())
    return frozenset((CONFIG_FILE, TOKENIZER_DIRECTORY, *files))
