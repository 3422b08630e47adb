"""Handoffs of caches that have a format: codes travel as they are, in fewer bytes, and the answer is the local one."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvc_trt import Engine
from kvc_trt.cli.main import run
from kvc_trt.errors import HandoffRefused
from kvc_trt.models.cache_formats import AUTO, CACHE_FORMATS
from tests.serving.dynamo.handed_over import asked, pair_of, tokens_of, whole

SETTINGS = ("--policy", "rocketkv", "--token-budget", "64", "--max-input-len", "1024", "--max-output-len", "64")


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """engines(form): the demo's engine in a format."""
    folder, made = tmp_path_factory.mktemp("formats"), {}

    def engine(form):
        if form not in made:
            made[form] = folder / form
            arguments = [*SETTINGS, "--kv-cache", form, "--no-verify", "-o", str(made[form])]
            assert run(["build", "--model", "retrieval-tiny", *arguments]) == 0
        return made[form]

    return engine


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("form", CACHE_FORMATS)
def test_the_bytes_that_move_are_those_of_the_format(engines, needle, form):
    engine = Engine.open(engines(form), threads=1)
    alone = engine.generate(needle, max_new_tokens=12, ignore_eos=True)
    with pair_of(engines(form)) as pair:
        chunks = asyncio.run(whole(pair, asked(needle, max_tokens=12, ignore_eos=True)))
    assert tokens_of(chunks) == list(alone.token_ids)
    context, model = engine.context(needle), engine.directory.model
    vectors = {name.partition(".")[0] for name in context.tensors} - {"slot_positions"}
    assert vectors == {"k", "v"} | {
        f"{kind}_{part}"
        for kind, vector in zip("kv", (CACHE_FORMATS[form].keys, CACHE_FORMATS[form].values), strict=True)
        if vector is not None
        for part in ("scale", "minimum")[: 1 + vector.grouped]
    }
    pairs = sum(context.cache_lengths) * model.num_key_value_heads
    of_pairs = pairs * CACHE_FORMATS[form].bytes_per_token(model.head_size, np.float32().nbytes)
    others = [tensor.nbytes for name, tensor in context.tensors.items() if name.startswith("slot_positions")]
    moved = chunks[-1]["engine_data"]["kvc"]["moved_bytes"]
    assert moved == of_pairs + sum(others) + context.logits.nbytes


@pytest.mark.slow
def test_a_decode_worker_of_another_format_refuses_before_a_byte_is_read(engines, needle):
    with pair_of(engines("int8")) as (prefill, _), pair_of(engines(AUTO)) as (_, decode):
        decode.transfers.peer = prefill.transfers
        with pytest.raises(HandoffRefused, match="has keys and values in format int8; this engine has auto"):
            asyncio.run(whole((prefill, decode), asked(needle, max_tokens=2)))
        assert decode.transfers.fetched == 0
