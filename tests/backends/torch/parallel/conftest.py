from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvc_trt.backends.torch.parallel import processes
from kvc_trt.backends.torch.parallel.executor import ParallelExecutor
from kvc_trt.backends.torch.parallel.group import RankGroup
from kvc_trt.graph.state import state_tensors
from kvc_trt.models.config import ModelConfig
from tests.backends.torch.conftest import _alone, no_chosen_library
from tests.backends.torch.parallel.forked_ranks import ForkedRanks
from tests.every_policy import parameters_of

__all__ = ["_alone", "new_processes", "no_chosen_library", "of_policy", "on_ranks", "on_shared_ranks"]

NEW_PROCESS = processes.started


@pytest.fixture(scope="session", autouse=True)
def _forked():
    """Ranks are forked, but for those of `new_processes` and of commands that run in processes of their own."""
    forked = ForkedRanks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "started", forked.started)
        yield
    forked.end()


@pytest.fixture
def new_processes(monkeypatch):
    """Ranks that this test starts are new processes, as users have them."""
    monkeypatch.setattr(processes, "started", NEW_PROCESS)


@pytest.fixture
def on_ranks(request):
    """on_ranks(program, ranks): its executor on ranks of its own, which end with the test."""

    def made(program, ranks, **options) -> ParallelExecutor:
        group = RankGroup(program.model, program.weight_file, ranks, **options)
        request.addfinalizer(group.end)
        return ParallelExecutor(program, group)

    return made


@pytest.fixture(scope="module")
def on_shared_ranks():
    """on_shared_ranks(program, ranks): its executor on the ranks of its weights, which end with the file's tests."""
    groups: dict[tuple[ModelConfig, Path, int], RankGroup] = {}

    def made(program, ranks) -> ParallelExecutor:
        key = program.model, program.weight_file.path, ranks
        if key not in groups or groups[key]._ended:  # a test that failed may have ended them
            groups[key] = RankGroup(program.model, program.weight_file, ranks)
        return ParallelExecutor(program, groups[key])

    yield made
    for group in groups.values():
        group.end()


@pytest.fixture
def of_policy():
    """of_policy(program, name, ...): the same weights under another policy."""

    def made(program, name, **changes):
        parameters = parameters_of(name, program.model, **changes)
        state = state_tensors(program.model, parameters, program.dtype)
        return replace(program, parameters=parameters, state=state)

    return made
