from __future__ import annotations

from functools import partial

import pytest

from kvc_trt.backends.opening import open_engine
from kvc_trt.cli.main import run
from kvc_trt.engine import EngineDirectory
from tests.plugins_cuda.conftest import emulation, gpu, no_chosen_library, one_thread

__all__ = ["emulation", "engine", "gpu", "no_chosen_library", "one_thread"]


@pytest.fixture(autouse=True)
def _alone(no_chosen_library):
    """Tests start without a library."""


@pytest.fixture(scope="session")
def make_program(make_program):
    """make_program(name, precision, ...) without graphs, which PyTorch never reads."""
    return partial(make_program, graphs=False)


@pytest.fixture(scope="session")
def engine(tmp_path_factory) -> EngineDirectory:
    """retrieval-tiny under RocketKV, built for ONNX Runtime."""
    path = tmp_path_factory.mktemp("engines") / "tiny"
    settings = ["--model", "retrieval-tiny", "--token-budget", "64", "--max-input-len", "512", "--max-output-len", "32"]
    assert run(["build", *settings, "--no-verify", "-o", str(path)]) == 0
    return open_engine(path)
