from __future__ import annotations

from dataclasses import replace

import pytest

from kvc_trt import policies
from kvc_trt.backends.torch.parallel.executor import ParallelExecutor
from kvc_trt.backends.torch.parallel.group import RankGroup
from kvc_trt.graph.state import state_tensors
from tests.backends.torch.conftest import _alone, make_program, no_chosen_library

__all__ = ["_alone", "make_program", "no_chosen_library", "of_policy", "on_ranks"]


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

    def made(program, policy, **changes):
        settings = {"token_budget": 32, "max_input_len": 256, "max_output_len": 16, **changes}
        parameters = policies.resolve(policy, model=program.model, **settings)
        state = state_tensors(program.model, parameters, program.dtype)
        return replace(program, parameters=parameters, state=state)

    return made
