from __future__ import annotations

import pytest
import torch

from tests.graph.small_models import make_small_engine


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_engine(tmp_path_factory):
    """make(policy, precision, model, ...) -> SmallEngine in a directory of its own."""
    return lambda *arguments, **keywords: make_small_engine(tmp_path_factory.mktemp("engine"), *arguments, **keywords)
