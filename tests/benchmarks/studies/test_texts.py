"""Documents of studies: each number of a kind gives another text; instructions stand where they should."""

from __future__ import annotations

import pytest

from benchmarks.studies import texts


@pytest.mark.parametrize("kind", texts.KINDS)
def test_documents_of_a_kind_differ_and_have_instructions(study_model, kind):
    first, second = (texts.KINDS[kind](study_model.tokenizer, index, 200) for index in range(2))
    assert first.text != second.text
    assert first.instructions
    assert len(set(first.instructions)) == len(first.instructions)


def test_an_instruction_stands_behind_the_document_or_in_front_of_it(study_model):
    document = texts.Document("Rain fell. Was it late?\nNo.", ("Sum up.",))
    for position, expected in (
        (texts.AT_END, "Rain fell. Was it late?\nNo.\n\nSum up."),
        (texts.AT_BEGINNING, "Sum up.\n\nRain fell. Was it late?\nNo."),
    ):
        prompt = document.prompt(study_model.framing, "Sum up.", position)
        assert prompt == list(study_model.tokenizer.tokenizer.encode(expected).ids)
