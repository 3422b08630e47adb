"""The Python package `tensorrt`, imported when an engine is built or run, and its messages."""

from __future__ import annotations

import importlib
import re
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, cast

from kvc_trt.backends.tensorrt.lowering.operators import FIRST_FOR_GRAPHS
from kvc_trt.errors import UnsupportedEnvironment

if TYPE_CHECKING:
    import tensorrt

PACKAGE = "tensorrt"
INSTALL = "pip install 'kvc-trt[tensorrt]'"


class TensorRT(Protocol):
    """The part of the module that is used here; the module is always passed as an argument.

    Its members have the types of the real module: the check against its stubs covers every name and every call.
    """

    __version__: str
    Builder: type[tensorrt.Builder]
    BuilderFlag: type[tensorrt.BuilderFlag]
    Dims: type[tensorrt.Dims]
    HardwareCompatibilityLevel: type[tensorrt.HardwareCompatibilityLevel]
    ILogger: type[tensorrt.ILogger]
    IProgressMonitor: type[tensorrt.IProgressMonitor]
    IStreamWriter: type[tensorrt.IStreamWriter]
    LayerInformationFormat: type[tensorrt.LayerInformationFormat]
    NetworkDefinitionCreationFlag: type[tensorrt.NetworkDefinitionCreationFlag]
    OnnxParser: type[tensorrt.OnnxParser]
    PreviewFeature: type[tensorrt.PreviewFeature]
    ProfilingVerbosity: type[tensorrt.ProfilingVerbosity]
    Runtime: type[tensorrt.Runtime]


def load_tensorrt() -> TensorRT:
    """Import `tensorrt`; UnsupportedEnvironment (found, expected, command) if it is missing, broken or too old."""
    try:
        module = importlib.import_module(PACKAGE)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == PACKAGE
        reason = "is not installed" if missing else f"does not load: {' '.join(str(error).split())}"
        raise UnsupportedEnvironment(
            f"Python package {PACKAGE} {reason}; expected TensorRT {_dotted(FIRST_FOR_GRAPHS)} or newer", hint=INSTALL
        ) from error
    loaded = cast("TensorRT", module)
    found = version_of(loaded)
    if found < FIRST_FOR_GRAPHS:
        raise UnsupportedEnvironment(
            f"TensorRT {loaded.__version__} is too old: expected {_dotted(FIRST_FOR_GRAPHS)} or newer", hint=INSTALL
        )
    return loaded


def version_of(trt: TensorRT) -> tuple[int, int]:
    """Return major and minor version, as the lowering needs them."""
    numbers = re.match(r"(\d+)\.(\d+)", trt.__version__)
    if numbers is None:
        raise UnsupportedEnvironment(f"TensorRT calls its version {trt.__version__!r}; expected numbers", hint=INSTALL)
    return int(numbers[1]), int(numbers[2])


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


MESSAGES_KEPT = 20


class Messages:
    """TensorRT's last warnings and errors, collected by `logger`."""

    def __init__(self) -> None:
        self.errors: deque[str] = deque(maxlen=MESSAGES_KEPT)
        self.warnings: deque[str] = deque(maxlen=MESSAGES_KEPT)

    def reason(self) -> str:
        """Return the last errors in one line; messages of plugins are on stderr."""
        return "; ".join(" ".join(message.split()) for message in list(self.errors)[-3:]) or "it gave no reason"

    def logger(self, trt: TensorRT) -> tensorrt.ILogger:
        """Return an ILogger of `trt`, which must outlive everything else."""
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
