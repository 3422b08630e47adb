"""Data sets that have another digest since the tokenizer's file is written otherwise have the same samples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.accuracy.formats.answers import GROUPS
from benchmarks.accuracy.smollm2.cells import SAME_QUESTIONS
from benchmarks.accuracy.smollm2.grid import MODEL, SEED
from benchmarks.accuracy.smollm2.stages import CORE, LONGEST_ANSWERS, SAMPLES
from kvc_trt.accuracy.draw import QuestionDraw
from kvc_trt.accuracy.questions import ModelVocabulary
from kvc_trt.accuracy.under_test.policy_engines import choose

BEFORE = "2225e8fb36485529d3c826106f8bec359b719a6bcc3f5d6314a834c7be153905"
"""SHA-256 of the tokenizer's file as it was written before."""


@pytest.mark.exhaustive
def test_both_digests_are_of_the_same_samples(smollm2_gguf) -> None:
    chosen = choose(MODEL, checkpoint=str(smollm2_gguf))
    vocabulary = ModelVocabulary(chosen.tokenizer, chosen.config.vocab_size, chosen.template)
    draw, found = QuestionDraw(SAMPLES, SEED, LONGEST_ANSWERS), {}
    for group in (one for name in GROUPS for one in CORE[name].groups):
        samples = draw.data_set(group, vocabulary)
        found[samples.digest] = replace(samples, tokenizer=BEFORE).digest
    assert found == SAME_QUESTIONS
