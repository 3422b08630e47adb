"""No output of an operator goes unread: whichever is wrong in one element, a check fails."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

from kvc_trt import policies
from kvc_trt.backends.harness import EngineOperator
from kvc_trt.backends.opening import harness_for
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.methods.base.registry import operators
from kvc_trt.runtime.session.batch import batch_of
from kvc_trt.verify.engine_run import observe
from kvc_trt.verify.questions.prompts import random_prompts
from kvc_trt.verify.rankings.array_errors import maximum_error
from kvc_trt.verify.rungs import inputs
from kvc_trt.verify.rungs.inputs import prompt_cases, step_cases
from kvc_trt.verify.rungs.operators import check_operators
from kvc_trt.verify.rungs.parts.prefill_attention import as_rounded
from kvc_trt.verify.thresholds import thresholds_for
from tests.plugins_cuda.conftest import one_thread
from tests.verify.conftest import MODEL

__all__ = ["one_thread"]

OUTPUTS = {
    "KvcPrefillAttention": ("output",),
    "KvcCompact": ("k_cache", "v_cache", "bounds", "cache_lengths", "indices"),
    "KvcHybridAttention": ("output", "k_cache", "v_cache", "bounds", "selected"),
    "KvcDenseAttention": ("output", "k_cache", "v_cache"),
}


@dataclass
class Damaged:
    """An operator with one element of one output changed."""

    operator: EngineOperator
    output: int
    damage: str

    def __post_init__(self):
        self.name, self.nodes, self.cache = self.operator.name, self.operator.nodes, self.operator.cache

    def run(self, **inputs):
        outputs = [np.array(value) for value in self.operator.run(**inputs)]
        values = outputs[self.output].reshape(-1)
        values[0] = np.nan if self.damage == "NaN" else values[0] + 1
        return outputs


def failing(engine, target):
    checks, _ = check_operators(engine, target, thresholds_for("fp32"))
    return {check.name for check in checks if check.passed is False}


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
@pytest.mark.parametrize("damage", ["one more", "NaN"])
def test_every_output_of_every_operator_is_checked(damage, backend, make_engine, parameters_for):
    engine = make_engine(parameters_for(skip_layers=1))
    target = harness_for(engine, RunOptions(backend, 1))
    operators = target.operators()
    assert {operator.name for operator in operators} == set(OUTPUTS)
    assert failing(engine, target) == set()
    for operator in operators:
        for index, output in enumerate(OUTPUTS[operator.name]):
            if damage == "NaN" and output in ("indices", "selected", "cache_lengths"):
                continue
            damaged = Damaged(operator, index, damage)
            failed = failing(engine, SimpleNamespace(truncates=False, operators=lambda damaged=damaged: [damaged]))
            assert any(name.startswith(operator.name) for name in failed), f"{operator.name} {output}"


METHODS = (
    "quest", "sparq", "streaming-llm", "streaming-llm, positions of the cache", "h2o", "tova", "keydiff",
    "expected-attention", "expected-attention-hybrid, no sinks", "rocketkv, budgets from the prompt",
)  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("policy", METHODS)
def test_every_output_of_a_methods_own_operators_is_checked(policy, make_engine, parameters_for):
    engine = make_engine(parameters_for(policy))
    target = harness_for(engine, RunOptions("onnxruntime", 1))
    assert failing(engine, target) == set()
    own = [operator for operator in target.operators() if operator.name not in OUTPUTS]
    assert own
    for operator in own:
        for index, output in enumerate(operators()[operator.name].outputs):
            if output.name == "bounds" and not engine.parameters.has_pages:
                continue  # nobody reads them
            damaged = Damaged(operator, index, "one more")
            failed = failing(engine, SimpleNamespace(truncates=False, operators=lambda damaged=damaged: [damaged]))
            assert any(name.startswith(operator.name) for name in failed), f"{operator.name}, output {index}"


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("policy", ["full", "hybrid", "quest", "sparq", "rocketkv"])
def test_operators_of_long_caches_are_checked(policy, together, make_engine, parameters_for, monkeypatch):
    """The bodies of steps that choose contain the number of slots; rows of long caches get a case each."""
    monkeypatch.setattr(inputs, "_MOST_SLOTS", 40)
    monkeypatch.setattr(inputs, "_MOST_ELEMENTS", 1 << 26 if together else 1)
    engine = make_engine(parameters_for(policy, skip_layers=0))
    assert engine.parameters.capacity > 40
    assert not failing(engine, harness_for(engine, RunOptions("onnxruntime", 1)))
    cases = list(step_cases(engine.model, engine.parameters, "float32", 0))
    assert all(len(case.cache_lengths) == 1 for case in cases) is not together
    assert len({case.name for case in cases}) == (2 if policy == "full" else 5)


def test_prompts_of_heavy_hitters_are_no_longer_than_the_longest_case():
    """The window of heavy hitters is every query of the longest prompt that an engine serves."""
    model = replace(MODEL, head_size=2, max_position_embeddings=1 << 16)
    parameters = policies.resolve("h2o", model=model, token_budget=32, max_input_len=40_000, max_output_len=32)
    case = next(prompt_cases(model, parameters, "float32", 0))
    assert case.prompt_lengths.max() <= case.k.shape[2] == case.q_window.shape[2] < 40_000


def test_the_page_bounds_that_quest_starts_from_are_checked(make_engine, parameters_for):
    engine = make_engine(parameters_for("quest", skip_layers=0))
    (compact,) = (
        one for one in harness_for(engine, RunOptions("onnxruntime", 1)).operators() if one.name == "KvcCompact"
    )
    damaged = Damaged(compact, OUTPUTS["KvcCompact"].index("bounds"), "one more")
    assert failing(engine, SimpleNamespace(truncates=False, operators=lambda: [damaged])) == {"KvcCompact caches"}


def test_a_nan_in_the_running_engine_is_not_hidden_by_the_steps_after_it(make_engine, parameters_for):
    engine = make_engine(parameters_for())
    target = harness_for(engine, RunOptions("torch", 1))
    executor_class = type(target.open())

    class Damaging(executor_class):
        """An executor whose first step has a NaN in its attention."""

        def exposed(self, name):
            found = super().exposed(name).copy()
            if name.startswith("attended") and self.runs == 1:
                found[0, 0, 0] = np.nan
            return found

    target.open = lambda expose=(): Damaging(engine, RunOptions(threads=1), expose=expose)
    batch = batch_of(random_prompts(MODEL, [60], 0))
    assert not observe(engine, target, batch, 3).output_error <= 1e-5


@pytest.mark.parametrize(("error", "passes"), [(0.0, True), (1e-3, True), (4e-3, False)])
def test_an_output_rounded_to_bfloat16_is_judged_before_it_was_rounded(error: float, passes: bool) -> None:
    """An operator that computes in bfloat16 inside of a float32 graph returns such numbers as float32."""
    exact = np.random.default_rng(0).standard_normal((1, 2, 64, 16)).astype(np.float32)
    largest = max(1.0, float(np.abs(exact).max()))
    widened = (exact + error * largest).astype("bfloat16").astype(np.float32)
    assert (maximum_error(as_rounded(widened), exact) <= 2e-3) == passes
    assert as_rounded(exact) is exact
