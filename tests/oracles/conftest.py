"""The random models of tests/reference, judged by other people's code."""

from tests.reference.conftest import _one_thread, exact, family

__all__ = ["_one_thread", "exact", "family"]
