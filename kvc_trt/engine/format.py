"""What an engine directory consists of: the files that all engines have, and what a backend says of its own.

All of it can be told from the directory alone: an engine for a GPU is checked and inspected on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

CONFIG_FILE, PREFILL_FILE, DECODE_FILE = "config.json", "prefill.onnx", "decode.onnx"
WEIGHTS_FILE, TOKENIZER_DIRECTORY = "weights.safetensors", "tokenizer"

GRAPH_FILES = {"weights": WEIGHTS_FILE, "prefill": PREFILL_FILE, "decode": DECODE_FILE}
"""Stage -> file of what every engine has."""


class EngineFormat(Protocol):
    """What one backend says of its engines' directories."""

    @property
    def name(self) -> str:
        """The backend, as config.json names it."""

    @property
    def files(self) -> Mapping[str, str]:
        """Stage -> the one file that it makes, in order: each may read the files of those before it."""

    def target_problem(self, target: Any) -> str | None:
        """What is wrong with `target` of a manifest; None if nothing is."""


def required_files(format: EngineFormat) -> tuple[str, ...]:
    """Files without which an engine of this format is not whole."""
    return CONFIG_FILE, *format.files.values()


def entries(formats: Iterable[EngineFormat]) -> frozenset[str]:
    """Every name that an engine directory of any of the formats may hold, besides its manifest."""
    files = (file.split("/")[0] for format in formats for file in format.files.values())
    return frozenset((CONFIG_FILE, TOKENIZER_DIRECTORY, *files))
