"""`make fuzz`: hostile inputs to every reader, for a given time; a table, a JSON record, and a test for what is bad."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.machine import record
from kvc_trt.tables import text_table
from tests.fuzz.campaign import ROOT, Plan, Result, run, write_regressions
from tests.fuzz.kind import kinds

HEADERS = ("kind", "inputs", "accepted", "refused", "bad", "slowest", "memory", "inputs/s")


def main() -> int:
    known = kinds()
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of all kinds together  [default: 10]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", choices=sorted(known), metavar="KIND", help=", ".join(known))
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "fuzz", help="folder of the record")
    parser.add_argument("--keep", action="store_true", help="write what is bad into tests/fuzz/regressions")
    parser.add_argument("--sum", type=Path, metavar="FOLDER", help="run nothing: add up the records in a folder")
    given = parser.parse_args()
    if given.sum is not None:
        _print_table(_added(sorted(given.sum.glob("*.json"))))
        return 0
    chosen = [kind for name, kind in known.items() if not given.kinds or name in given.kinds]
    with tempfile.TemporaryDirectory(prefix="kvc-trt-fuzz-") as folder:
        plan = Plan(60 * given.minutes, given.seed, Path(folder))
        results = run(chosen, plan, _show, lambda result: _show(result, done=True))
    _clear()
    _print_table(results)
    for result in results:
        _explain(result)
    given.output.mkdir(parents=True, exist_ok=True)
    path = given.output / f"fuzz-{given.seed}.json"
    figures = {"seed": given.seed, "minutes": given.minutes, "kinds": [result.as_json() for result in results]}
    path.write_text(json.dumps({**record(), **figures}, indent=1) + "\n")
    print(f"record: {path}")
    findings = [finding for result in results for finding in result.findings]
    folder = Path("tests/fuzz/regressions") if given.keep else given.output / "regressions"
    for path in write_regressions(findings, ROOT / folder if given.keep else folder):
        print(f"test case: {path}")
    return 1 if any(result.bad or result.findings for result in results) else 0


def _print_table(results: list[Result]) -> None:
    rows = [_row(result) for result in [*results, _sum("all", results)]]
    print(text_table(HEADERS, rows, right=tuple(range(1, len(HEADERS)))))


def _added(records: list[Path]) -> list[Result]:
    """One result for each kind from the records of several runs."""
    by_kind: dict[str, list[Result]] = {}
    for path in records:
        for found in json.loads(path.read_text())["kinds"]:
            by_kind.setdefault(found["kind"], []).append(Result(**found))
    return [_sum(kind, results) for kind, results in by_kind.items()]


def _row(result: Result) -> tuple[str, ...]:
    rate = result.inputs / result.seconds if result.seconds else 0
    return (
        result.kind, f"{result.inputs:,}", f"{result.accepted:,}", f"{result.refused:,}", f"{result.bad:,}",
        f"{result.slowest_seconds:.2f} s", f"{result.peak_bytes >> 20} MiB", f"{rate:,.0f}",
    )  # fmt: skip


def _sum(kind: str, results: list[Result]) -> Result:
    def total(name: str) -> int:
        return sum(getattr(result, name) for result in results)

    return Result(
        kind, total("inputs"), total("accepted"), total("refused"), total("bad"),
        max((result.slowest_seconds for result in results), default=0.0),
        peak_bytes=max((result.peak_bytes for result in results), default=0), seconds=total("seconds"),
    )  # fmt: skip


def _explain(result: Result) -> None:
    if result.left_out is not None:
        print(f"\n{result.kind} was left out: {result.left_out}")
    if result.compared:
        refused = sum(result.only_ours.values())
        print(f"\n{result.kind}: another reader read {result.compared:,}, and refused {refused:,} of them")
        for reason, count in sorted(result.only_ours.items(), key=lambda item: -item[1]):
            print(f"  {count:,}: {reason}")
    for finding in result.findings:
        print(f"\nBAD {result.kind} {finding['number']}: {finding['key']}\n  {finding['message'][:300]}")


def _show(result: Result, done: bool = False) -> None:
    if sys.stderr.isatty() or done:
        text = "  ".join(f"{name} {value}" for name, value in zip(HEADERS, _row(result), strict=True))
        sys.stderr.write(f"{text}\n" if done else f"\r\x1b[K{text}")
        sys.stderr.flush()


def _clear() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")


if __name__ == "__main__":
    sys.exit(main())
