"""Type stubs of the package `tensorrt`, generated from the wheel of its bindings.

    python -m tests.backends.tensorrt.stubs DIRECTORY       # the one that MYPYPATH will name

The wheel of the bindings holds the module but not the libraries it needs, so it is imported on top of empty ones. The
stubs come out of a proprietary wheel: they are generated where they are needed and never kept.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

MODULE = "tensorrt_bindings.tensorrt"
MAJOR = 11
FUNCTIONS = (
    "createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL",
    "createNvOnnxParser_INTERNAL", "createNvOnnxParserRefitter_INTERNAL", "getBuilderPluginRegistry",
    "getNvOnnxParserVersion", "initLibNvInferPlugins", "getPluginRegistry",
)  # fmt: skip
"""Names that the bindings look up when they are imported."""
IN = re.compile(r"\bin: ")
"""A parameter that C++ may call `in` and Python may not."""

SHADOWING = "bool: "
"""A data type of that name would hide Python's own."""
PROTOCOLS = {
    "class Dims:": ["    def __iter__(self) -> collections.abc.Iterator[int]: ..."],
    "class DimsExprs:": ["    def __iter__(self) -> collections.abc.Iterator[IDimensionExpr]: ..."],
    "class IHostMemory:": ["    def __buffer__(self, flags: int, /) -> memoryview: ..."],
}
"""Members that these classes offer through C alone: iteration by index, and their bytes."""


def main(typings: Path) -> None:
    """Write typings/tensorrt/__init__.pyi."""
    libraries = typings / "libraries"
    libraries.mkdir(parents=True, exist_ok=True)
    source = "\n".join(f"void *{name}(void) {{ return 0; }}" for name in FUNCTIONS)
    _library(libraries, "nvinfer", source)
    for name in ("nvinfer_plugin", "nvonnxparser"):
        _library(libraries, name, "")
    generated = typings / "generated"
    command = [Path(sys.executable).with_name("pybind11-stubgen"), MODULE, "-o", generated]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"error: pybind11-stubgen failed: {done.stderr[-2000:]}")
    text = (generated / MODULE.replace(".", "/")).with_suffix(".pyi").read_text()
    (typings / "tensorrt").mkdir(exist_ok=True)
    (typings / "tensorrt" / "__init__.pyi").write_text(repaired(text))
    shutil.rmtree(generated)


def repaired(text: str) -> str:
    """The stubs as mypy can read them: names that Python takes, and protocols of the classes that it does not see."""
    lines = []
    for line in text.splitlines():
        if line.startswith(SHADOWING):
            continue
        if line.lstrip().startswith("def "):
            line = IN.sub("in_: ", line)
            if " = " in line and line.rstrip().endswith(":"):
                line = _defaults(line)
        lines.append(line)
        lines += PROTOCOLS.get(line, ())
    return "\n".join(["# mypy: ignore-errors", *lines, "__version__: str", ""])


def _defaults(line: str) -> str:
    """Give every parameter after the first with a default one as well."""
    opening, closing = line.index("("), line.rindex(")")
    parts = re.split(r", (?=\*?\w+(?:: |=|$))", line[opening + 1 : closing])
    seen = False
    for index, part in enumerate(parts):
        if " = " in part:
            seen = True
        elif seen and not part.startswith("*"):
            parts[index] = f"{part} = ..."
    return f"{line[: opening + 1]}{', '.join(parts)}{line[closing:]}"


def _library(folder: Path, name: str, source: str) -> None:
    file = f"lib{name}.so.{MAJOR}"
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{file}", "-o", folder / file, "-x", "c", "-"]
    subprocess.run(command, input=source, text=True, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
