"""What stays in the cache and what a step reads: resolution of budgets, and the methods. Light: torch only on use."""

from kvc_trt.methods.parameters import BASELINE, DEFAULT, PolicyParameters
from kvc_trt.methods.registry import Description, applicable, available, describe, fixed, method, named, resolve

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
