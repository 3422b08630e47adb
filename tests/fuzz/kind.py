"""A kind of input that a stranger may hand us: what is valid, how it is spoiled, who reads it, and what it may cost.

A file in `kinds/` adds kinds: it names them in `KINDS`, and nothing else needs to know of them.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any, ClassVar, NamedTuple, TypeAlias

from tests.fuzz.mutation.raw import RAW

Mutator: TypeAlias = Callable[[Random, bytes, Sequence[bytes]], bytes]
"""A function from a source of chance, an input and all seeds to another input."""


class Comparison(NamedTuple):
    """The outcome of another reader for an input that ours accepts."""

    same: bool
    refused: str = ""
    """The other reader's reason for refusing it, if it does: one that many inputs share, not their bytes."""
    difference: str = ""
    """The difference in meaning, if both accept it."""


SAME = Comparison(same=True)


class Kind(ABC):
    """One format. An object belongs to one process, which may write to `folder`."""

    name: ClassVar[str]
    mutators: Sequence[Mutator] = RAW
    seconds: ClassVar[float] = 10.0
    """The most processor time that one input may take, and a third of the time that may pass."""
    memory: ClassVar[int] = 512 << 20
    """The most bytes by which one input may raise the process's peak."""
    native: ClassVar[bool] = False
    """True if compiled code reads the input, which can end the process."""
    needs: ClassVar[str | None] = None
    """For a kind that has seeds only after a compilation: the part to compile, named where the kind is left out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def seeds(self) -> Sequence[bytes]:
        """Valid inputs, made by what writes them in earnest. Empty where this machine cannot make any."""

    def specimens(self) -> Sequence[bytes]:
        """Inputs that somebody thought of; each is tried once, and spoiled like a seed."""
        return ()

    @abstractmethod
    def read(self, content: bytes) -> Any:
        """Read the input as a command or the API does, and do with it what they do next; KvcError refuses it."""

    def compared(self, content: bytes, found: Any) -> Comparison | None:
        """Compare what `read` returned with what another reader makes of the same input; None without one."""
        return None

    def file(self, content: bytes, name: str) -> Path:
        """Write the input to a file of this process; it stands for one that a user names."""
        path = self.folder / name
        path.write_bytes(content)
        return path


def kinds() -> dict[str, type[Kind]]:
    """Return every kind by name, in the order of the files' names."""
    folder = Path(__file__).parent / "kinds"
    found: dict[str, type[Kind]] = {}
    for module in sorted(pkgutil.iter_modules([str(folder)]), key=lambda module: module.name):
        for kind in import_module(f"tests.fuzz.kinds.{module.name}").KINDS:
            assert kind.name not in found, f"two kinds are named {kind.name}"
            found[kind.name] = kind
    return found
