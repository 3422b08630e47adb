from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvc_trt.accuracy.under_test.policy_engines import PolicyEngines, open_model
from kvc_trt.tasks import registry
from kvc_trt.tasks.task import string_match_all
from tests.accuracy.key_value import MAX_NEW_TOKENS, NAME, generate_key_value


@pytest.fixture
def key_value(monkeypatch: pytest.MonkeyPatch) -> str:
    """The shipped model's task, known by name for as long as a test lasts."""
    one = registry.Task(NAME, "lines", "", MAX_NEW_TOKENS, generate_key_value, string_match_all, "")
    monkeypatch.setitem(registry.all_tasks(), NAME, one)
    return NAME


@pytest.fixture(scope="module")
def tiny() -> Iterator[PolicyEngines]:
    """The shipped model, its weights written once per module."""
    with open_model("retrieval-tiny") as model:
        yield model
