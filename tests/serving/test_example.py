"""The first request of the example can be answered."""

from __future__ import annotations

from tokenizers import Tokenizer, models

from kvc_trt import Engine
from kvc_trt.serving.example import BEGINNING, RECORDS, example_text


def test_the_shipped_model_answers_its_example(retrieval_engine):
    engine = Engine.open(retrieval_engine, threads=1)
    asked = example_text(engine.directory.tokenizer)
    assert asked == RECORDS
    assert engine.generate(asked, max_new_tokens=8).text == "scarlet tiger lagos eight"


def test_the_example_of_another_model_continues_a_sentence():
    assert example_text(Tokenizer(models.WordLevel({"the": 0}, unk_token="the"))) == BEGINNING
