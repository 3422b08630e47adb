from __future__ import annotations

import pytest

import kvc_trt


@pytest.fixture(scope="session")
def retrieval_engine(tmp_path_factory):
    """An engine directory of the shipped model, which tests leave as it is."""
    path = tmp_path_factory.mktemp("serving") / "tiny"
    kvc_trt.build("retrieval-tiny", token_budget=64, output=path, verify=False)
    return path
