from __future__ import annotations

from dataclasses import replace

import pytest

from kvc_trt.backends.torch.parallel.executor import ParallelExecutor
from kvc_trt.backends.torch.parallel.group import RankGroup
from kvc_trt.graph.state import state_tensors
from tests.backends.torch.conftest import _alone, no_chosen_library
from tests.every_policy import parameters_of

__all__ = ["_alone", "no_chosen_library", "of_policy", "on_ranks"]


@pytest.fixture
def on_ranks(request):
    """on_ranks(program, ranks): its executor; the ranks end with the test."""

    def made(program, ranks, **options) -> ParallelExecutor:
        group = RankGroup(program.model, program.weights_path, ranks, **options)
        request.addfinalizer(group.end)
        return ParallelExecutor(program, group)

    return made


@pytest.fixture
def of_policy():
    """of_policy(program, name, ...): the same weights under another policy."""

    def made(program, name, **changes):
        parameters = parameters_of(name, program.model, **changes)
        state = state_tensors(program.model, parameters, program.dtype)
        return replace(program, parameters=parameters, state=state)

    return made
