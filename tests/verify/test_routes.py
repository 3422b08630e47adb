"""The reference goes on from an engine's experts where their router logits nearly tie, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from kvc_trt.verify.routes import FollowedRoutes, Routes
from tests.oracles.family_models import our_config

LOGITS = torch.tensor([[4.0, 2.0, 1.7, -1.0], [0.5, 0.2, 0.4, -0.3]])
OWN = [[0, 1], [0, 2]]


def followed(*chosen: list[list[int]], bar: float = 0.1) -> FollowedRoutes:
    routes = Routes(our_config("mixtral"), None, {}, {0: [torch.tensor(one) for one in chosen]})  # type: ignore[arg-type]
    return FollowedRoutes(routes, bar)


def test_equal_choices_are_no_near_ties_in_whatever_order():
    found = followed([[1, 0], [2, 0]])
    assert found(0, LOGITS, 2).tolist() == [[1, 0], [2, 0]]
    assert (found.tokens, found.unlike, found.wrong) == (2, 0, [])


def test_near_ties_are_followed_and_others_are_not():
    """Of 4.0 the bar is 0.4, of logits below 1 it is 0.1; the second choice of token 1 is 0.2 below the reference's."""
    found = followed([[0, 2], [0, 1]])
    assert found(0, LOGITS, 2).tolist() == [[0, 2], OWN[1]]
    assert (found.unlike, len(found.wrong)) == (2, 1)
    assert found.wrong[0] == "layer 0, token 1: [0, 1], reference [0, 2]"
    check = found.check("turns: ")
    assert (check.name, check.passed) == ("turns: experts unlike the reference's own run", False)
    assert found.widest == pytest.approx(0.2)


def test_the_pair_that_changed_places_is_judged_not_the_last_ranks():
    """Both lists end 0.3 apart, and the experts that changed places are 2.3 apart."""
    found = followed([[1, 2], OWN[1]], bar=0.5)
    assert found(0, LOGITS, 2).tolist() == OWN
    assert found.widest == pytest.approx(2.3 / 4)


def test_logits_that_are_no_numbers_are_no_near_ties():
    found = followed([[0, 2]])
    found(0, torch.tensor([[4.0, 2.0, float("nan"), -1.0]]), 2)
    assert len(found.wrong) == 1


def test_tokens_are_taken_in_the_order_in_which_they_were_recorded():
    found = followed([OWN[0]], [OWN[1]])
    assert [found(0, row[None], 2).tolist() for row in LOGITS] == [[one] for one in OWN]
    assert found.tokens == 2


def test_tokens_that_the_engine_did_not_reach_have_the_reference_s_own_experts():
    found = followed([[0, 2]])
    assert found(0, LOGITS, 2).tolist() == [[0, 2], OWN[1]]
    assert (found.tokens, found.unlike, found.wrong) == (1, 1, [])


def test_a_layer_whose_experts_the_engine_lacks_is_wrong():
    found = followed([OWN[0]])
    assert found(1, LOGITS, 2).tolist() == OWN
    assert found.wrong == ["layer 1: the engine has no experts"]
