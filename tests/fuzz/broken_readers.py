"""Readers with every defect that `make fuzz` looks for; each shows it at one byte, after some valid inputs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from kvc_trt.errors import InputError
from tests.fuzz.kind import Comparison, Kind
from tests.fuzz.mutation.raw import flip_bits, truncate

BAD = b"!"


class Broken(Kind):
    name = "broken"
    seconds: ClassVar[float] = 0.2
    mutators = (flip_bits, truncate)

    def seeds(self) -> Sequence[bytes]:
        return [b"a valid input"]

    def specimens(self) -> Sequence[bytes]:
        return [b"padding on both sides of " + BAD + b" and more of it"]

    def read(self, content: bytes) -> Any:
        if BAD in content:
            self.fail()
        if b"valid" not in content:
            raise InputError("refused")
        return content

    def fail(self) -> None:
        raise KeyError("no error of ours")


class Crashing(Broken):
    name = "crashing"
    native = True

    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class Spinning(Broken):
    name = "spinning"

    def fail(self) -> None:
        while True:
            pass


class Deaf(Broken):
    """Does not come back, and hears no alarm: as compiled code that loops."""

    name = "deaf"

    def fail(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGPROF})
        time.sleep(60)


class Greedy(Broken):
    name = "greedy"
    seconds: ClassVar[float] = 10.0
    memory: ClassVar[int] = 64 << 20

    def fail(self) -> None:
        bytearray(os.urandom(1) * (128 << 20))


class Verbose(Broken):
    """Its error repeats a line of the input; only where errors are not bounded does it get that far."""

    name = "verbose"

    def fail(self) -> None:
        error = InputError("short")
        error.args = ("\x1b[2J",)
        raise error


class Different(Broken):
    name = "different"

    def fail(self) -> None:
        pass

    def specimens(self) -> Sequence[bytes]:
        return [b"valid " + BAD, b"valid ?"]

    def compared(self, content: bytes, found: Any) -> Comparison:
        if BAD in content:
            return Comparison(False, difference="names")
        return Comparison(False, refused="a question") if b"?" in content else Comparison(True)


class Strict(Broken):
    """Refuses its own seed."""

    name = "strict"

    def read(self, content: bytes) -> Any:
        raise InputError("refused")


KINDS = (Broken, Crashing, Spinning, Deaf, Greedy, Verbose, Different, Strict)
