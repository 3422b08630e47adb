"""Measure what each policy costs in answers: ask tasks under every policy and budget, beside the full cache.

`run.evaluate` measures and writes the report. It measures what `policy_engines.open_model` opens, or an engine as a
`model_under_test.BuiltEngine`.
"""

from kvc_trt.accuracy.cell import Cell
from kvc_trt.accuracy.grid import QuestionGroup, Variant
from kvc_trt.accuracy.pages.report import AccuracyReport, Bars

__all__ = ["AccuracyReport", "Bars", "Cell", "QuestionGroup", "Variant"]
