"""What a kernel library, or a call into one, can refuse."""

from __future__ import annotations

from kvc_trt.errors import KvcError, UnsupportedEnvironment
from kvc_trt.kernels.structs import Status


class KernelLibraryError(UnsupportedEnvironment):
    """A kernel library that cannot be loaded, or is another one than this version of kvc-trt can call."""


class KernelError(KvcError):
    """A kernel library refused a call; `status` says what kind of refusal, the message which field and why."""

    exit_code = 3

    def __init__(self, status: int, message: str) -> None:
        known = {int(member): member.name for member in Status}
        super().__init__(f"{message} ({known.get(status, f'unknown status {status}')})")
        self.status = status
