from __future__ import annotations

import hashlib
import json

import pytest

from kvc_trt.errors import InputError
from kvc_trt.tasks.kinds.key_value import (
    BOS,
    FILLER_IDS,
    KEY_IDS,
    QUERY,
    QUERY_TOKENS,
    RECORD,
    RECORD_TOKENS,
    SPECIALS,
    VALUE_IDS,
    WORDS,
    KeyValueSample,
    Placement,
    generate,
    text_of,
)

PLACEMENTS: tuple[Placement, ...] = ("in_prompt", "after_compaction")


def records_of(sample: KeyValueSample) -> dict[int, tuple[int, ...]]:
    ids = sample.prompt_ids
    records = [ids[i : i + RECORD_TOKENS] for i, token in enumerate(ids) if token == RECORD]
    return {key: tuple(values) for _, key, *values in records}


def test_words_are_distinct_and_id_ranges_follow_their_order() -> None:
    assert len(set(WORDS)) == len(WORDS)
    assert [len(ids) for ids in (KEY_IDS, *VALUE_IDS, FILLER_IDS)] == [128, 32, 32, 32, 32, 64]
    assert KEY_IDS.start == len(SPECIALS)
    assert FILLER_IDS.stop == len(WORDS)
    assert text_of((RECORD, KEY_IDS[0], VALUE_IDS[0][0], VALUE_IDS[3][-1])) == "<record> anchor amber thirty-two"


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("context_tokens", "pairs"), [(9, 1), (256, 32), (1024, 128), (2048, 1)])
def test_prompt_has_the_exact_length_and_one_record_per_key(
    context_tokens: int, pairs: int, placement: Placement
) -> None:
    for index in range(5):
        sample = generate(seed=1, index=index, context_tokens=context_tokens, pairs=pairs, placement=placement)
        assert len(sample.prompt_ids) == context_tokens
        assert sample.prompt_ids[0] == BOS
        records = records_of(sample)
        assert len(records) == sample.prompt_ids.count(RECORD) == pairs
        assert set(records) <= set(KEY_IDS)
        assert all(value in ids for values in records.values() for value, ids in zip(values, VALUE_IDS, strict=True))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_answer_is_the_record_of_the_asked_key(placement: Placement) -> None:
    for index in range(20):
        sample = generate(seed=2, index=index, context_tokens=256, pairs=32, placement=placement)
        *_, query, key = sample.prompt_ids + sample.query_ids
        assert query == QUERY
        assert records_of(sample)[key] == sample.answer_ids


def test_placement_moves_the_query_and_keeps_the_question() -> None:
    inside = generate(seed=3, index=7, context_tokens=128, pairs=12, placement="in_prompt")
    late = generate(seed=3, index=7, context_tokens=128, pairs=12, placement="after_compaction")
    assert inside.query_ids == ()
    assert QUERY not in late.prompt_ids
    assert inside.prompt_ids[-QUERY_TOKENS:] == late.query_ids
    assert inside.answer_ids == late.answer_ids
    assert records_of(inside) == records_of(late)


def test_records_spread_over_the_whole_prompt_and_every_one_is_asked() -> None:
    samples = [generate(seed=4, index=index, context_tokens=512, pairs=4) for index in range(200)]
    depths = [i / 512 for sample in samples for i, token in enumerate(sample.prompt_ids) if token == RECORD]
    assert 0.45 < sum(depths) / len(depths) < 0.55
    asked = [list(records_of(sample)).index(sample.prompt_ids[-1]) for sample in samples]
    assert all(30 <= asked.count(record) <= 70 for record in range(4))


def test_a_sample_depends_on_nothing_but_its_arguments() -> None:
    def draw(index: int) -> KeyValueSample:
        return generate(seed=5, index=index, context_tokens=96, pairs=8)

    forwards = [draw(index) for index in range(8)]
    backwards = [draw(index) for index in reversed(range(8))]
    assert forwards == backwards[::-1]
    assert len(set(forwards)) == 8
    assert draw(0) != generate(seed=6, index=0, context_tokens=96, pairs=8)


def test_the_data_set_is_the_recorded_one() -> None:
    samples = [generate(seed=0, index=index, context_tokens=256, pairs=32) for index in range(16)]
    text = json.dumps([[sample.prompt_ids, sample.answer_ids] for sample in samples])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "9943e4cb752abadd"


@pytest.mark.parametrize(
    ("context_tokens", "pairs", "message"),
    [
        (194, 32, "32 pairs need 195 tokens, the context has 194"),
        (1024, 0, "pairs is 0, expected 1 to 128"),
        (1024, 129, "pairs is 129, expected 1 to 128"),
    ],
)
def test_key_value_contexts_that_do_not_fit_are_refused(context_tokens: int, pairs: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        generate(seed=0, index=0, context_tokens=context_tokens, pairs=pairs)


def test_the_query_needs_room_only_inside_the_prompt() -> None:
    sample = generate(seed=0, index=0, context_tokens=193, pairs=32, placement="after_compaction")
    assert len(sample.prompt_ids) == 193


def test_unknown_placement_is_refused() -> None:
    with pytest.raises(InputError, match="placement is 'before'"):
        generate(seed=0, index=0, context_tokens=64, pairs=4, placement="before")  # type: ignore[arg-type]
