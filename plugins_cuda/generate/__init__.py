"""Writes the C++ that follows from the operators' schemas: `python -m plugins_cuda.generate` from the root.

The files are committed, so that compiling needs no Python; a test checks that they are current.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from plugins_cuda.generate.header import limits_header, parameters_header
from plugins_cuda.generate.plugins import dimensions_header, operator_sources, operators_header
from plugins_cuda.generate.rotated import rotated_header
from plugins_cuda.generate.validation import rules_header

PLUGINS = Path(__file__).resolve().parents[1]
NOTE = "Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cuda.generate`; edit those."


def generated() -> Mapping[Path, str]:
    """Path and text of every generated file."""
    texts = {
        "include/kvc/limits.h": f"/* {NOTE} */\n{limits_header()}",
        "include/kvc/parameters.h": f"/* {NOTE} */\n{parameters_header()}",
        "src/parameter_rules.h": f"// {NOTE}\n{rules_header()}",
        "src/rotated_parameters.h": f"// {NOTE}\n{rotated_header()}",
        "tensorrt/dimensions.h": f"// {NOTE}\n{dimensions_header()}",
        "tensorrt/operators.h": f"// {NOTE}\n{operators_header()}",
        **{f"tensorrt/operators/{name}": f"// {NOTE}\n{text}" for name, text in operator_sources().items()},
    }
    return {PLUGINS / name: laid_out(PLUGINS / name, text) for name, text in texts.items()}


def laid_out(path: Path, text: str) -> str:
    """The text, laid out by clang-format; raises RuntimeError where there is no clang-format."""
    folders = (str(Path(sys.executable).parent), os.environ.get("PATH", ""))
    program = shutil.which("clang-format", path=os.pathsep.join(folders))
    if program is None:
        raise RuntimeError("no clang-format in this Python or on PATH: pip install '.[test]'")
    command = [program, f"--assume-filename={path}"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=path.parent).stdout
