"""A program for `test_opened_files.py`: runs commands, and says which code opened the files of one folder.

python -m tests.opened_files FOLDER reads command lines, as JSON, from its standard input. It prints their exit codes,
and how often each module of kvc-trt opened a file of the folder.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import kvc_trt
from kvc_trt.cli.main import run

PACKAGE = Path(kvc_trt.__file__).parent


def watch(folder: Path) -> Counter[str]:
    """Count, from now on, which module of kvc-trt is nearest to each opening of a file in `folder`."""
    opened: Counter[str] = Counter()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], (str, bytes, os.PathLike)):
            return
        path = Path(os.path.abspath(os.fsdecode(arguments[0])))
        if path.is_relative_to(folder):
            opened[_opener()] += 1

    sys.addaudithook(hook)
    return opened


def _opener() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            return path.relative_to(PACKAGE).as_posix()
        frame = frame.f_back  # type: ignore[assignment]
    return "nothing of kvc-trt"


if __name__ == "__main__":
    opened = watch(Path(sys.argv[1]))
    codes = [run(command) for command in json.load(sys.stdin)]
    print(json.dumps({"codes": codes, "opened": opened}))
