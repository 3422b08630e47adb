"""The time of the kernels on an H100 and an H200, predicted from their machine code. Nothing is measured.

    make predict                                   # builds what it needs, then writes result and page
    python -m benchmarks.predict build             # the same with what is in build/
    python -m benchmarks.predict build --before    # writes the predictions that later ones are compared with
    python -m benchmarks.predict --check           # whether docs/kernels.md is what the result says

BUILD is a CMake build folder with libkvc_emulation_executions.so. nvcc compiles the kernels with line numbers; that
library counts how often each line is run on the sizes of every case (counts.py); frequencies.py lays that on the code;
kernel_time.py says what follows; hardware.py lists every assumption with its source.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import store
from benchmarks.predict import hardware, page
from kvc_trt.files.atomic import write_whole


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predict", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("build", type=Path, nargs="?", metavar="BUILD")
    parser.add_argument("--before", action="store_true", help="write them as those that later ones are compared with")
    parser.add_argument("--check", action="store_true", help="fail where docs/kernels.md is not what the result says")
    options = parser.parse_args(arguments)
    if options.check:
        return check()
    if options.build is None:
        parser.error("BUILD is missing: the CMake build folder")
    from benchmarks.predict.snapshot import Predictor

    snapshot = Predictor(options.build).snapshot()
    result = page.read() if page.RESULT.is_file() else {}
    result = merged(result, snapshot, as_before=options.before)
    store.write(page.RESULT, result)
    write_whole(page.PAGE, page.whole(page.PAGE.read_text(encoding="utf-8"), result).encode())
    print(page.predicted(result))
    return 0


def merged(result: dict[str, Any], snapshot: dict[str, Any], *, as_before: bool) -> dict[str, Any]:
    """Return the result with the new predictions in their place; the first ones stand in both."""
    before = snapshot if as_before else result.get("before", snapshot)
    now = result.get("now", snapshot) if as_before else snapshot
    return {
        "kind": "prediction",
        "measured": False,
        "error": hardware.ERROR,
        "assumptions": hardware.assumptions(),
        "before": before,
        "now": now,
    }


def check() -> int:
    """Compares page and result, and says where the kernels are others than those of the result."""
    from benchmarks.predict.snapshot import sources_digest

    result = page.read()
    text = page.PAGE.read_text(encoding="utf-8")
    if page.whole(text, result) != text:
        print(f"error: {page.PAGE.name} is not what predicted/{page.RESULT.name} says; make predict", file=sys.stderr)
        return 1
    if result["now"]["sources"] != sources_digest():
        print(f"predicted/{page.RESULT.name} is of kernels that have changed since: make predict", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
