"""The parameter structs of the kernels' C ABI, through the emulation: what is refused before memory is touched."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvc_trt.errors import InputError
from kvc_trt.kernels.c_library import CLibrary
from tests.fuzz.kind import Kind
from tests.fuzz.mutation.trees import JSON, of_trees

LIBRARY = Path(__file__).resolve().parents[3] / "build" / "libkvc_emulation.so"


class Structs(Kind):
    """{"operation", "fields", "workspace"}: no kernel runs, so addresses need not exist."""

    name = "kernel-structs"
    native = True
    needs = "there is no emulation of the kernels: make emulation-plain"
    mutators = (of_trees(JSON),)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        path = Path(os.environ.get("KVC_TRT_KERNELS", LIBRARY))
        self._library = CLibrary(path) if path.is_file() else None

    def seeds(self) -> Sequence[bytes]:
        if self._library is None:
            return []
        from tests.plugins_cuda.bad_calls import NUMBERS, POINTERS

        found = []
        for operation, numbers in NUMBERS.items():
            addresses = {name: 4096 * (1 + place) << 20 for place, name in enumerate(POINTERS[operation])}
            call = {"operation": operation, "fields": {**numbers, **addresses}, "workspace": 1 << 40, "bytes": 1 << 30}
            found.append(json.dumps(call).encode())
        return found

    def read(self, content: bytes) -> Any:
        from tests.plugins_cuda.bad_calls import STRUCTS

        assert self._library is not None
        try:
            call = json.loads(content)
            struct = STRUCTS[call["operation"]]()
            for name, value in call["fields"].items():
                if name in dict(struct._fields_):
                    setattr(struct, name, value if value is None else int(value))
            workspace, size = int(call["workspace"]), int(call["bytes"]) % (1 << 64)
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
            ctypes.ArgumentError,
        ) as error:
            raise InputError("no call could be made of it") from error
        library, operation = self._library, call["operation"]
        library.workspace_bytes(operation, struct)
        return library.checked_launches_of(lambda: library.call(operation, struct, workspace % (1 << 64), size))


KINDS = (Structs,)
