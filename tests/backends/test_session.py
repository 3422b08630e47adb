from __future__ import annotations

import pytest

from kvc_trt.backends.session import open_session
from kvc_trt.errors import InputError
from kvc_trt.runtime import Request


def test_an_engine_answers(tiny_engine):
    session = open_session(tiny_engine, max_batch_size=2, threads=1)
    assert session.tokenizer is None
    assert session.executor.limits.max_input_len == 256
    outputs = session.generate([Request([3] * 100, 4, ignore_eos=True), Request([7], 2, ignore_eos=True)])
    assert [len(output.token_ids) for output in outputs] == [4, 2]
    assert outputs[0].logical_length == 103
    assert max(outputs[0].physical_lengths) < 103


def test_a_damaged_engine_is_refused_before_anything_is_loaded(tiny_engine):
    weights = tiny_engine / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(InputError, match=r"weights\.safetensors"):
        open_session(tiny_engine)
