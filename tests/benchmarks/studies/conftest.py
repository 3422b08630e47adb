"""The model that tests of studies measure: one that is shipped, with the text form of its prompts."""

from __future__ import annotations

import pytest

from benchmarks.studies.watched import open_study_model


@pytest.fixture(scope="session")
def study_model():
    return open_study_model("retrieval-text", 256)
