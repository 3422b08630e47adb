"""A kernel library with the C ABI of plugins_cuda/include/kvc/, called with addresses through ctypes alone.

A library is executable code, so it is loaded only from an explicit path, from KVC_TRT_KERNELS or from the package's
`lib` folder, never from the working directory or the system's search path.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from kvc_trt.errors import KvcError, UnsupportedEnvironment
from kvc_trt.kernels.structs import (
    ABI_VERSION,
    EmulatedExecutions,
    EmulatedLaunch,
    Message,
    Parameters,
    PrefetchParameters,
    Status,
)

EXECUTORS = {"cuda": "cuda", "emulation": "cpu"}
"""Executor name reported by a library -> device type of the pointers it takes."""
SCHEDULES = ("forward", "reverse", "shuffled")
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100")
"""GPUs whose limits the emulation can hold."""


_Record = TypeVar("_Record", EmulatedExecutions, EmulatedLaunch)


class KernelLibraryError(UnsupportedEnvironment):
    """A kernel library that cannot be loaded, or that this version of kvc-trt cannot call."""


class KernelError(KvcError):
    """A kernel library refused a call; `status` is the kind of refusal, the message names the field and the reason."""

    exit_code = 3

    def __init__(self, status: int, message: str) -> None:
        known = {int(member): member.name for member in Status}
        super().__init__(f"{message} ({known.get(status, f'unknown status {status}')})")
        self.status = status


class CLibrary:
    """One loaded library. Symbols are bound on first call, so a library may have only some of the operations."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path).absolute()
        if not self.path.is_file():
            raise KernelLibraryError(f"{self.path}: no kernel library there")
        try:
            self._library = ctypes.CDLL(str(self.path), mode=ctypes.RTLD_LOCAL)
        except OSError as error:
            raise KernelLibraryError(f"{self.path} cannot be loaded: {error}") from error
        version = self._bind("kvc_abi_version", ctypes.c_int32)()
        if version != ABI_VERSION:
            raise KernelLibraryError(f"{self.path} has ABI version {version}; expected {ABI_VERSION}: build it again")
        self.executor: str = self._bind("kvc_executor", ctypes.c_char_p)().decode("ascii", "replace")
        """ "cuda" or "emulation"."""
        if self.executor not in EXECUTORS:
            raise KernelLibraryError(f"{self.path} says its executor is {self.executor!r}; expected cuda or emulation")

    @property
    def device_type(self) -> str:
        """Type of the device that tensors must be on: "cuda", or "cpu" for the emulation."""
        return EXECUTORS[self.executor]

    def workspace_bytes(self, operation: str, params: Parameters) -> int:
        """Return the scratch memory, in bytes, that `operation` ("kvc_compact" and so on) needs for these sizes."""
        wanted = ctypes.c_uint64()
        self._call(f"{operation}_workspace", ctypes.byref(params), ctypes.byref(wanted))
        return wanted.value

    def call(
        self, operation: str, params: Parameters, workspace: int | None, workspace_bytes: int, stream: int | None = None
    ) -> None:
        """Make one call of the C ABI; KernelError unless it returns KVC_OK. Wrong pointers are not caught."""
        self._call(
            operation,
            ctypes.byref(params),
            ctypes.c_void_p(workspace),
            ctypes.c_uint64(workspace_bytes),
            ctypes.c_void_p(stream),
        )

    def prefetch(self, first: int, count: int, stream: int | None = None) -> None:
        """Start to read `count` bytes from the address `first` on into the L2 cache, a hint; both multiples of 16."""
        self._call("kvc_prefetch", ctypes.byref(PrefetchParameters(bytes=count, first=first)), ctypes.c_void_p(stream))

    def read_switches(self) -> None:
        """Let the library read the switches of the environment again (`kvc_trt.kernels.switches`)."""
        self._bind("kvc_read_switches", None)()

    def set_active_clusters(self, count: int) -> None:
        """Set how many clusters the emulation's GPU holds at once, for sizes not asked before; 0 is its own number."""
        self._bind("kvc_emulation_set_active_clusters", None)(ctypes.c_int64(count))

    def refuse_queries(self, count: int) -> None:
        """Let the emulation refuse the next `count` questions of launches about clusters and requests for memory."""
        self._bind("kvc_emulation_refuse_queries", None)(ctypes.c_int64(count))

    def set_schedule(self, order: str, seed: int = 0) -> None:
        """Set the order in which the emulation runs blocks and threads; a result that depends on it lacks a barrier."""
        if self.executor != "emulation":
            raise ValueError(f"{self.path} runs on {self.executor}; only the emulation has schedules")
        bind = self._bind("kvc_emulation_set_schedule", None)
        bind(ctypes.c_int32(SCHEDULES.index(order)), ctypes.c_uint64(seed))

    def set_device(self, architecture: str) -> None:
        """Set the GPU whose limits the emulation holds, one of ARCHITECTURES; the first one until this is called."""
        bind = self._bind("kvc_emulation_set_device", ctypes.c_int)
        if bind(ctypes.c_char_p(architecture.encode())) != Status.OK:
            raise ValueError(f"architecture {architecture!r}: expected one of {', '.join(ARCHITECTURES)}")

    def checked_launches_of(self, call: Callable[[], object]) -> list[EmulatedLaunch]:
        """Like `launches_of`, but no kernel runs: its launches are held against the device's limits alone.

        No memory is read or written, so the addresses of the call need not exist. KernelError for a refused launch.
        """
        checks_only = self._bind("kvc_emulation_set_checks_only", None)
        checks_only(ctypes.c_int32(1))
        try:
            return self.launches_of(call)
        finally:
            checks_only(ctypes.c_int32(0))

    def launches_of(self, call: Callable[[], object]) -> list[EmulatedLaunch]:
        """Return the launches of one call of the emulation, in order."""
        self._bind("kvc_emulation_clear_launches", None)()
        call()
        return self._records("kvc_emulation_launches", EmulatedLaunch)

    def executions_of(self, call: Callable[[], object]) -> tuple[list[EmulatedExecutions], list[EmulatedLaunch]]:
        """Return the executions of one call's warps, piece by piece, and its launches.

        Pieces are counted by the library kvc_emulation_executions alone; of others there are none.
        """
        launches = self.launches_of(call)
        return self._records("kvc_emulation_executions", EmulatedExecutions), launches

    def _records(self, symbol: str, record: type[_Record]) -> list[_Record]:
        """Return all that the emulation has recorded of one kind."""
        read = self._bind(symbol, ctypes.c_int64)
        records = (record * read(None, ctypes.c_int64(0)))()
        read(records, ctypes.c_int64(len(records)))
        return list(records)

    def _call(self, symbol: str, *arguments: Any) -> None:
        message = Message()
        status = self._bind(symbol, ctypes.c_int)(*arguments, ctypes.byref(message))
        if status != Status.OK:
            text = message.text.decode("utf-8", "replace") or "no message"
            raise KernelError(status, f"{symbol}: {text}")

    def _bind(self, symbol: str, result: Any) -> Any:
        try:
            function = getattr(self._library, symbol)
        except AttributeError:
            raise KernelLibraryError(f"{self.path} has no {symbol}") from None
        function.restype = result
        return function
