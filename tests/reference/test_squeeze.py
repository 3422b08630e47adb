from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.policies import resolve
from kvc_trt.reference.model.squeeze import groups, squeeze, unimportant_from
from tests.graph.small_models import LLAMA

NO_LIMIT = 10**9
GOLDEN = [0.42, 0.71, 0.69, 0.93, 0.95, 0.94, 0.96, 0.70]
COSINES = st.lists(st.integers(-64, 64).map(lambda x: x / 64), min_size=1, max_size=12)


def test_golden_cosines_give_the_golden_budgets() -> None:
    found = squeeze(GOLDEN, 100, share=0.35, minimum=1, maximum=NO_LIMIT)
    assert found == ((165, 165, 165, 35, 35, 35, 35, 165), 0)


@pytest.mark.parametrize(
    ("cosines", "expected"),
    [
        (GOLDEN, (1, 2, 2, 3, 3, 3, 3, 2)),
        ([0.2, 0.9, 0.5], (1, 3, 2)),
        ([0.2, 0.9, 0.2], (1, 3, 1)),
        ([0.5] * 3, (1, 1, 1)),
    ],
)
def test_layers_are_grouped_by_cosine(cosines: list[float], expected: tuple[int, ...]) -> None:
    assert groups(cosines) == expected


def test_budgets_equal_the_papers_example() -> None:
    budgets = squeeze([0.1] * 18 + [0.9] * 14, 1000, share=0.3, minimum=1, maximum=NO_LIMIT).budgets
    assert budgets == (1545,) * 8 + (1544,) * 10 + (300,) * 14


LLAMA2_70B = [0.2] * 8 + [0.5] * 9 + [0.9] * 63
"""17 important layers and 63 others, as the paper's table 8 has Llama2-70B."""


def test_the_papers_largest_model_has_room_at_three_and_a_half_budgets() -> None:
    """By hand: 80 * 1000 - 63 * 350 = 57,950 = 17 * 3408 + 14; at twice the budget 17 layers stop at 2000."""
    wide = squeeze(LLAMA2_70B, 1000, share=0.35, minimum=1, maximum=3500)
    assert wide == ((3409,) * 14 + (3408,) * 3 + (350,) * 63, 0)
    narrow = squeeze(LLAMA2_70B, 1000, share=0.35, minimum=1, maximum=2000)
    assert narrow == ((2000,) * 31 + (1200,) + (350,) * 48, 0)  # 23,950 tokens go on: 14 * 1650 + 850


@pytest.mark.parametrize(("cosines", "budgets"), [([0.5] * 4, (10,) * 4), ([0.2, 0.9, 0.2, 0.9], (17, 3, 17, 3))])
def test_fewer_than_three_distinct_cosines_make_fewer_groups(cosines: list[float], budgets: tuple[int, ...]) -> None:
    assert squeeze(cosines, 10, share=0.35, minimum=1, maximum=NO_LIMIT).budgets == budgets


@given(st.lists(st.integers(0, 40), min_size=7, max_size=7).map(sorted))
def test_clusters_are_the_best_of_all(values: list[int]) -> None:
    """Small integers: sums are exact, so a tie is a tie."""
    cuts = [i for i in range(1, 7) if values[i] != values[i - 1]]

    def cost(i: int, j: int) -> float:
        segments = values[:i], values[i:j], values[j:]
        return sum(sum((x - sum(s) / len(s)) ** 2 for x in s) for s in segments)

    if len(cuts) >= 2:
        best = min(cost(i, j) for i, j in combinations(cuts, 2))
        found = unimportant_from(values)
        assert min(cost(i, found) for i in cuts if i < found) == pytest.approx(best, abs=1e-9)


@given(COSINES, st.integers(20, 400), st.floats(0.05, 1), st.integers(1, 20), st.integers(0, 800))
def test_sums_are_exact_within_the_limits(
    cosines: list[float], budget: int, share: float, minimum: int, room: int
) -> None:
    maximum = budget // 2 + room
    budgets, unplaced = squeeze(cosines, budget, share=share, minimum=minimum, maximum=maximum)
    assert sum(budgets) + unplaced == len(cosines) * budget
    assert max(budgets) <= maximum
    assert min(budgets) >= min(minimum, maximum)
    assert unplaced == 0 or set(budgets) == {maximum}


@given(st.permutations(range(8)))
def test_reordered_layers_are_budgeted_alike(order: list[int]) -> None:
    """400 / 5 layers leaves no remainder here, so no layer is one token ahead of its equal."""
    plain = squeeze(GOLDEN, 100, share=0.35, minimum=1, maximum=NO_LIMIT).budgets
    found = squeeze([GOLDEN[i] for i in order], 100, share=0.35, minimum=1, maximum=NO_LIMIT).budgets
    assert found == tuple(plain[i] for i in order)


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        ("hybrid", {"layer_budget": "squeeze"}, "evicts nothing"),
        ("pyramidkv", {"layer_budget": "squeeze"}, "divides its budget itself"),
        ("snapkv", {"layer_budget": "squeeze-online"}, "per query head"),
        ("keydiff", {"layer_budget": "squeeze-online"}, r"its eviction \(keydiff\) does not rank"),
        ("rocketkv-mt", {"layer_budget": "squeeze-online"}, r"its eviction \(admitted-per-turn\) does not rank"),
        ("snapkv-gqa", {"layer_budget": "sqeeze"}, "expected one of uniform, squeeze"),
        ("snapkv-gqa", {"layer_budget": "squeeze", "squeeze_share": 0}, "squeeze_share is 0"),
        ("snapkv-gqa", {"squeeze_share": 0.5}, "no use without --layer-budget"),
        ("snapkv-gqa", {"squeeze_cap": 3}, "squeeze_cap has no use without --layer-budget squeeze-online"),
        ("snapkv-gqa", {"layer_budget": "squeeze", "squeeze_cap": 3}, "without --layer-budget squeeze-online"),
        (
            "snapkv-gqa",
            {"layer_budget": "squeeze-online", "squeeze_cap": 0.5},
            "squeeze_cap is 0.5; expected 1 to 1024",
        ),
        ("snapkv-gqa", {"layer_budget": "squeeze-online", "squeeze_cap": True}, "squeeze_cap is True; expected 1 to"),
        ("snapkv-gqa", {"layer_budget": "squeeze", "layer_budgets": (80, 80)}, "expected 3 integers"),
        ("snapkv-gqa", {"layer_budget": "squeeze", "layer_budgets": (80, 80, 4)}, "expected 32 to 250"),
    ],
)
def test_impossible_settings_are_refused(policy: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(policy, model=LLAMA, token_budget=256, max_input_len=250, max_output_len=8, **settings)


def test_layers_get_their_own_caches() -> None:
    settings = {"layer_budget": "squeeze", "layer_budgets": (60, 40, 32)}
    parameters = resolve("rocketkv", model=LLAMA, token_budget=40, max_input_len=250, max_output_len=8, **settings)
    assert [parameters.layer_capacity(layer) for layer in range(3)] == [68, 48, 40]
    assert parameters.groups(1)[0].parameters.prompt_budget == 40
    assert parameters.groups(1)[0].parameters.page_size == parameters.page_size


def test_online_budgets_have_room_for_twice_the_uniform_one() -> None:
    settings = {"layer_budget": "squeeze-online", "squeeze_share": 0.5}
    uniform = resolve("snapkv-gqa", model=LLAMA, token_budget=72, max_input_len=250, max_output_len=8)
    online = resolve("snapkv-gqa", model=LLAMA, token_budget=72, max_input_len=250, max_output_len=8, **settings)
    assert (uniform.most_kept, online.most_kept, online.capacity) == (64, 128, 136)
    assert online.prompt_budget == uniform.prompt_budget


@pytest.mark.parametrize(("cap", "most"), [(1, 64), (2, 128), (3.5, 224), (3.9, 249), (1.15625, 74), (100, 250)])
def test_the_room_of_online_budgets_can_be_set(cap: float, most: int) -> None:
    settings = {"layer_budget": "squeeze-online", "squeeze_cap": cap}
    online = resolve("snapkv-gqa", model=LLAMA, token_budget=72, max_input_len=250, max_output_len=8, **settings)
    assert (online.most_kept, online.capacity) == (most, most + 8)
