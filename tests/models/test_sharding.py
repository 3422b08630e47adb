"""The parts of all ranks are the weights: nothing is missing, and only tensors declared as shared are there twice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.models.config import Attention, Experts, FeedForward, Linear, ModelDescription, Norms
from kvc_trt.models.presets import load_preset
from kvc_trt.models.sharding import RowsOfEach, describe_shards, shards
from kvc_trt.models.weights import expected_tensors
from tests.small_model import SMALL


@st.composite
def models_and_ranks(draw):
    """Return a model, and a number of ranks among which it can be divided."""
    ranks, kv_heads = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    group, inner = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    heads = kv_heads * group
    assume(heads % ranks == 0)
    assume(kv_heads % ranks == 0 or ranks % kv_heads == 0)
    experts = None
    if draw(st.booleans()):
        count, dense = draw(st.integers(1, 3)), draw(st.sampled_from([(), (0,)]))
        size, shared = draw(st.integers(1, 3)) * ranks, draw(st.integers(0, 2)) * ranks
        experts = Experts(count, 1, size, shared_size=shared, dense_layers=dense)
    bias = experts is None and draw(st.booleans())
    model = replace(
        SMALL,
        description=ModelDescription(experts=experts, feed_forward=FeedForward(gated=not bias, bias=bias)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_size=draw(st.sampled_from([2, 4])),
        hidden_size=draw(st.integers(1, 8)),
        intermediate_size=inner * ranks,
        vocab_size=draw(st.integers(1, 23)),
        num_hidden_layers=2,
        tie_word_embeddings=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )
    return model, ranks


@given(models_and_ranks())
def test_shards_are_a_partition_of_the_weights(drawn):
    model, ranks = drawn
    found = shards(model, ranks)
    copies = max(1, ranks // model.num_key_value_heads)
    for name, shape in expected_tensors(model).items():
        times = np.zeros(shape, int)
        for shard in found:
            part = shard.extent(name, shape)
            assert len(part) == len(shape)
            times[np.ix_(*part)] += 1
        if any(projection in name for projection in ("q_proj", "k_proj", "v_proj")):
            expected = copies
        elif name.endswith("down_proj.bias"):
            expected = ranks
        elif "_proj" in name or name == "lm_head.weight":
            expected = 1
        else:
            expected = ranks
        assert (times == expected).all(), name


def test_rows_of_each_expert_are_read_one_by_one_or_in_slices():
    rows = RowsOfEach(range(0, 30, 10), range(4, 6))
    assert list(rows) == [4, 5, 14, 15, 24, 25]
    assert [rows[place] for place in range(len(rows))] == list(rows)
    assert (rows[-1], rows[1:4], rows[:]) == (25, (5, 14, 15), tuple(rows))
    with pytest.raises(IndexError):
        rows[6]


@given(models_and_ranks())
def test_a_rank_has_the_query_heads_of_its_kv_heads_and_projects_some_of_them(drawn):
    model, ranks = drawn
    found = shards(model, ranks)
    assert [head for shard in found for head in shard.output_heads] == list(range(model.num_attention_heads))
    assert [token for shard in found for token in shard.vocabulary] == list(range(model.vocab_size))
    for shard in found:
        assert {head // model.group_size for head in shard.query_heads} == set(shard.kv_heads)
        assert set(shard.output_heads) <= set(shard.query_heads)
        assert shard.local.group_size == model.group_size
        assert len(shard.vocabulary) <= shard.vocabulary_width


@given(models_and_ranks())
def test_a_rank_computes_a_model_of_its_shapes(drawn):
    """The local model expects its part of each tensor, without the columns of another rank's share."""
    model, ranks = drawn
    for shard in shards(model, ranks):
        local = expected_tensors(shard.local)
        for name, shape in expected_tensors(model).items():
            part = tuple(map(len, shard.extent(name, shape)))
            if name.endswith("o_proj.bias"):
                assert (name in local) == (shard.rank == 0) == bool(part[0])
            elif name.endswith("o_proj.weight"):
                assert part[0] == local[name][0]
            elif name != "lm_head.weight":
                assert part == local[name], name


EIGHT_HEADS = replace(SMALL, num_attention_heads=8, num_key_value_heads=4, intermediate_size=96)


@pytest.mark.parametrize(
    ("changes", "ranks", "message", "hint"),
    [
        ({}, 3, r"--tp 3: 8 query heads cannot be divided among 3 ranks", "--tp 2 or 4 or 8"),
        ({"intermediate_size": 100}, 8, r"--tp 8: 100 channels of the feed-forward block cannot", "--tp 2 or 4"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4, "6 KV heads can be neither divided", "2 or 3 or 6"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, 2, "7 query heads", "runs in one process"),
    ],
)
def test_a_number_of_ranks_that_cannot_be_is_refused_with_the_numbers(changes, ranks, message, hint):
    with pytest.raises(InputError, match=message) as refused:
        shards(replace(EIGHT_HEADS, **changes), ranks)
    assert hint in refused.value.hint


def test_kv_heads_on_several_ranks_are_named():
    assert "2 of 4 KV heads" in describe_shards(EIGHT_HEADS, 2)
    assert "fewer KV heads (4) than ranks, so each is on 2 of them" in describe_shards(EIGHT_HEADS, 8)


def test_the_last_of_four_ranks_of_llama_70b_has_its_part():
    shard = shards(load_preset("llama3.1-70b").config, 4)[3]
    assert (shard.query_heads, shard.kv_heads) == (range(48, 64), range(6, 8))
    assert (shard.inner, shard.vocabulary) == (range(21504, 28672), range(96192, 128256))


@pytest.mark.parametrize(
    ("description", "words"),
    [
        (ModelDescription(norms=Norms(heads="together")), "a norm over all heads of queries or keys"),
        (ModelDescription(norms=Norms(heads="apart")), "norms of queries and keys with other weights for each head"),
        (ModelDescription(attention=(Attention(linear=Linear(1, 1, 8, 8, 4)), Attention())), "linear layers"),
        (ModelDescription(attention=(Attention(gated=True),)), "gates of attention's result"),
        (ModelDescription(attention_softcap=30.0), "capped logits, sinks of attention and clamped gates"),
        (ModelDescription(experts=Experts(4, 2, 31)), "31 channels of each expert cannot be divided among 2 ranks"),
        (
            ModelDescription(experts=Experts(4, 2, 32, shared_size=7)),
            "7 channels of the shared expert cannot be divided",
        ),
    ],
)
def test_parts_that_are_not_divided_are_refused_by_name(description, words):
    with pytest.raises(InputError, match=words):
        shards(replace(SMALL, qk_norm=True, description=description), 2)
