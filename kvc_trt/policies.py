"""Policies: the tokens that a cache keeps and a step reads. Resolve budgets, list the methods. Imports no torch."""

from kvc_trt.methods.base.parameters import BASELINE, DEFAULT, PolicyParameters
from kvc_trt.methods.base.registry import Description, applicable, available, describe, fixed, method, named, resolve

__all__ = [
    "BASELINE",
    "DEFAULT",
    "Description",
    "PolicyParameters",
    "applicable",
    "available",
    "describe",
    "fixed",
    "method",
    "named",
    "resolve",
]
