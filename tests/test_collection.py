"""The sample of a product of parameters has every pair of values, and few tests."""

from __future__ import annotations

import gc
from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.collection import covering_pairs, evenly

pytest_plugins = ["pytester"]


def pairs_of(products):
    return {pair for values in products for pair in combinations(sorted(values.items()), 2)}


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_every_pair_of_a_full_product_is_in_the_sample(counts):
    products = [dict(enumerate(values)) for values in product(*map(range, counts))]
    chosen = covering_pairs(products)
    assert pairs_of(products[place] for place in chosen) == pairs_of(products)
    largest, second = sorted(counts)[:-3:-1]
    assert largest * second <= len(chosen) <= len(products)


@given(
    st.lists(st.fixed_dictionaries({"a": st.integers(0, 3), "b": st.integers(0, 3), "c": st.booleans()}), max_size=40)
)
def test_pairs_that_do_not_occur_are_not_asked_for(products):
    assert pairs_of(products[place] for place in covering_pairs(products)) == pairs_of(products)


def test_a_single_parameter_keeps_all_its_values():
    assert covering_pairs([{"a": value} for value in range(7)]) == list(range(7))


def test_the_sample_of_a_large_product_is_small():
    products = [dict(enumerate(values)) for values in product(range(15), range(3), range(3), range(2))]
    assert 45 <= len(covering_pairs(products)) <= 50


PRODUCT = """
    import pytest

    @pytest.mark.pairwise
    @pytest.mark.parametrize("a", range(4))
    @pytest.mark.parametrize("b", range(3))
    @pytest.mark.parametrize("c", range(2))
    def test_product(a, b, c): pass

    @pytest.mark.one_in(3)
    @pytest.mark.parametrize("case", range(7))
    def test_cases(case): pass

    @pytest.mark.one_in(5)
    @pytest.mark.parametrize("case", range(2))
    def test_few_cases(case): pass

    @pytest.mark.exhaustive
    def test_long(): pass

    def test_short(): pass
"""


@pytest.fixture
def collecting(pytester):
    """A project whose tests `tests.collection` chooses and orders."""
    pytester.makeconftest(
        """
        import pytest
        from tests import collection
        pytest_addoption = collection.add_option
        pytest_collection_modifyitems = pytest.hookimpl(trylast=True)(collection.choose)

        @pytest.fixture
        def smollm2_gguf(): pass
        """
    )
    pytester.makeini(
        "[pytest]\nmarkers =\n    one_in(n)\n    pairwise\n    exhaustive\n    slow\n    dynamo\n    triton\n"
    )
    return pytester


@pytest.mark.parametrize(("arguments", "passed", "deselected"), [((), 17, 18), (("--everything",), 35, 0)])
def test_a_run_takes_the_sample_and_everything_takes_all_cases(collecting, arguments, passed, deselected):
    collecting.makepyfile(PRODUCT)
    collecting.runpytest_inprocess(*arguments).assert_outcomes(passed=passed, deselected=deselected)


def test_functions_with_the_same_cases_begin_at_different_ones(collecting):
    function = "@pytest.mark.one_in(3)\n@pytest.mark.parametrize('case', 'abc')\ndef test_{}(case): pass\n"
    collecting.makepyfile("import pytest\n" + "".join(map(function.format, range(12))))
    lines = [line for line in collecting.runpytest_inprocess("--collect-only", "-q").outlines if "::" in line]
    assert len(lines) == 12
    assert {line[-2] for line in lines} == set("abc")


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 9), st.integers(0, 8))
def test_a_sample_of_a_product_has_its_values_equally_often(outer, inner, count, first):
    products = [{"outer": one, "inner": other} for one, other in product(range(outer), range(inner))]
    chosen = evenly(products, count, first % count)
    assert len(chosen) == len(set(chosen)) == -(-len(products) // count)
    for name, values in {"outer": outer, "inner": inner}.items():
        often = Counter(products[place][name] for place in chosen)
        assert max(often.values()) <= -(-len(chosen) // values) + 1


def test_a_sample_of_one_parameter_is_spread_over_its_values():
    assert evenly([{"a": value} for value in range(10)], 3, 1) == [1, 2, 4, 7]


def test_files_of_servers_come_first_then_real_models_then_those_with_most_slow_tests(collecting):
    slow = "import pytest\n@pytest.mark.slow\n"
    collecting.makepyfile(
        test_a="def test_quick(): pass",
        test_b=f"{slow}@pytest.mark.parametrize('n', [1, 2])\ndef test_slow(n): pass",
        test_c=f"{slow}def test_of_a_real_model(smollm2_gguf): pass",
        test_d="import pytest\n@pytest.mark.dynamo\ndef test_of_a_server(): pass",
    )
    lines = collecting.runpytest_inprocess("--collect-only", "-q").outlines
    files = [line.partition(".py::")[0] for line in lines if "::" in line]
    assert files == ["test_d", "test_c", "test_b", "test_b", "test_a"]


def test_collections_of_garbage_pass_the_collected_tests_over():
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
