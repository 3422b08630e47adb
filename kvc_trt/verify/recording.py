"""Write a report into the record of an engine's verifications."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.engine.verification import Verification, record_verification

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.verify.report import Report


def record_report(engine: EngineDirectory, report: Report) -> None:
    """Record a report in the engine's directory, if that can be written to."""
    about = report.description
    found = Verification(
        level=report.level,
        passed=report.passed,
        run_by=about["backend"],
        seed=about["seed"],
        samples=about["samples"],
        steps=about["steps"],
    )
    record_verification(engine, found)
