"""A real chat model fills in a schema: its answer validates, and says what it was asked."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel

from kvc_trt import Engine, Grammar, Sampling, build
from kvc_trt.runtime.session import drafting
from tests.runtime.test_speculation import Always

pytestmark = pytest.mark.slow
QUESTION = "Anna is 34 years old and lives in Paris, where it is sunny today. Write this as JSON."


class Person(BaseModel):
    name: str
    age: int
    city: str
    weather: Literal["sunny", "cloudy", "rainy"]


@pytest.fixture(scope="module")
def path(smollm2_gguf, tmp_path_factory):
    directory = tmp_path_factory.mktemp("engines") / "chat"
    build(
        "smollm2-135m-instruct", checkpoint=str(smollm2_gguf), policy="rocketkv", token_budget=128, max_input_len=512,
        max_output_len=64, weights="fp32", draft_tokens=4, verify=False, output=directory,
    )  # fmt: skip
    return directory


@pytest.fixture(scope="module")
def engine(path):
    with Engine.open(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def greedy(engine):
    """The greedy answer of plain steps."""
    return engine.chat(QUESTION, schema=Person).text


def test_answers_of_a_real_model_validate(engine, greedy):
    person = Person.model_validate_json(greedy)
    assert (person.name, person.age, person.city) == ("Anna", 34, "Paris")
    output = engine.chat(QUESTION, schema=Person, sampling=Sampling(temperature=1.5, seed=0))
    assert output.finish_reason != "stop" or Person.model_validate_json(output.text)
    choice = Grammar.choice(["yes", "no"])
    assert engine.chat("Is Paris in France?", schema=choice).text in ("yes", "no")


@pytest.mark.exhaustive
def test_drafts_of_forced_text_save_steps(path, greedy, monkeypatch):
    monkeypatch.setattr(drafting, "Payoff", Always)
    with Engine.open(path, speculate="ngram:4") as engine:
        assert engine.chat(QUESTION, schema=Person).text == greedy
        assert engine.session().timings.accepted_tokens >= 4, "of the names of the fields"
