"""A stub library with the C ABI: it keeps the last parameters, and refuses on request."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

from kvc_trt.kernels.structs import Parameters

INCLUDE = Path(__file__).resolve().parents[2] / "plugins_cuda" / "include"
WORKSPACE_BYTES = 4096

_SOURCE = """
#include <string.h>
#include "kvc/kvc.h"

KVC_API const char* kvc_executor(void) { return EXECUTOR; }
KVC_API int32_t kvc_abi_version(void) { return VERSION; }
KVC_API unsigned char double_params[512];
KVC_API int double_calls, double_status;
KVC_API uint64_t double_workspace_bytes;
KVC_API void* double_workspace;

#define OPERATION(name, Params)                                                                       \\
    KVC_API KvcStatus name##_workspace(const Params* params, uint64_t* bytes, KvcMessage* message) {  \\
        (void)params, (void)message;                                                                  \\
        *bytes = 4096;                                                                                \\
        return KVC_OK;                                                                                \\
    }                                                                                                 \\
    KVC_API KvcStatus name(const Params* params, void* workspace, uint64_t workspace_bytes,           \\
                           void* stream, KvcMessage* message) {                                       \\
        (void)stream;                                                                                 \\
        double_calls++;                                                                               \\
        memcpy(double_params, params, sizeof *params);                                                \\
        double_workspace = workspace;                                                                 \\
        double_workspace_bytes = workspace_bytes;                                                     \\
        if (double_status) strcpy(message->text, "page_size is 0; expected at least 1");              \\
        return (KvcStatus)double_status;                                                              \\
    }
OPERATION(kvc_compact, KvcCompactParams)
OPERATION(kvc_dense_attention, KvcDenseAttentionParams)
#ifndef INCOMPLETE
OPERATION(kvc_hybrid_attention, KvcHybridAttentionParams)
OPERATION(kvc_rotated_hybrid_attention, KvcRotatedHybridAttentionParams)
OPERATION(kvc_rotated_dense_attention, KvcRotatedDenseAttentionParams)
#endif
"""


def compiler() -> str:
    """Return a C compiler; the kernels' tests need one anyway."""
    found = shutil.which("cc") or shutil.which("gcc")
    assert found, "these tests compile C: install gcc"
    return found


def compile_double(
    directory: Path, *, executor: str = "emulation", version: str = "KVC_ABI_VERSION", incomplete: bool = False
) -> Path:
    """Compile the double; it reports `executor` and `version` as its own."""
    source, target = directory / "double.c", directory / "libdouble.so"
    source.write_text(_SOURCE)
    options = [f'-DEXECUTOR="{executor}"', f"-DVERSION={version}", *(["-DINCOMPLETE"] if incomplete else [])]
    command = [compiler(), "-shared", "-fPIC", "-Wall", "-Werror", f"-I{INCLUDE}", *options, str(source)]
    subprocess.run([*command, "-o", str(target)], check=True)
    return target


class Calls:
    """The arguments with which a double was called."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self.count = ctypes.c_int.in_dll(self._library, "double_calls")
        self.status = ctypes.c_int.in_dll(self._library, "double_status")
        self.workspace_bytes = ctypes.c_uint64.in_dll(self._library, "double_workspace_bytes")
        self.workspace = ctypes.c_void_p.in_dll(self._library, "double_workspace")

    def params(self, kind: type[Parameters]) -> dict[str, int | None]:
        """Fields of the last parameter struct."""
        stored = kind.in_dll(self._library, "double_params")
        return {name: getattr(stored, name) for name, *_ in kind._fields_}
