"""What TensorRT says while it works, kept for the user's error message."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from kvc_trt.backends.tensorrt.module import TensorRT

if TYPE_CHECKING:
    import tensorrt

MESSAGES_KEPT = 20


class Messages:
    """What TensorRT said: warnings and errors, the last ones. `logger` hands it over."""

    def __init__(self) -> None:
        self.errors: deque[str] = deque(maxlen=MESSAGES_KEPT)
        self.warnings: deque[str] = deque(maxlen=MESSAGES_KEPT)

    def reason(self) -> str:
        """The last errors in one line; what plugins said stands on stderr."""
        return "; ".join(" ".join(message.split()) for message in list(self.errors)[-3:]) or "it gave no reason"

    def logger(self, trt: TensorRT) -> tensorrt.ILogger:
        """An ILogger of `trt`; the builder wants it to outlive everything else."""
        base: Any = trt.ILogger
        severity, messages = base.Severity, self

        class Logger(base):  # type: ignore[misc]
            def __init__(self) -> None:
                base.__init__(self)

            def log(self, level: Any, message: str) -> None:
                if level in (severity.INTERNAL_ERROR, severity.ERROR):
                    messages.errors.append(message)
                elif level == severity.WARNING:
                    messages.warnings.append(message)

        return Logger()  # type: ignore[no-any-return]
