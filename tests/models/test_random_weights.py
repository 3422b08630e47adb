from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.models import random_weights
from kvc_trt.models.random_weights import RandomWeights


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 700))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_values_do_not_depend_on_how_a_tensor_is_cut(tiny_config, start, stop, block):
    start, stop = min(start, stop), max(start, stop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_weights, "_BLOCK_ELEMENTS", block)
        source = RandomWeights(tiny_config(), 7)
        whole = source.read("model.embed_tokens.weight")
        part = source.read_rows("model.embed_tokens.weight", start, stop)
    assert whole.shape == (50, 64)
    np.testing.assert_array_equal(part, whole[start:stop])


def test_same_seed_same_values_other_seed_other_values(tiny_config):
    name = "model.layers.0.mlp.up_proj.weight"
    first, again, other = (RandomWeights(tiny_config(), seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.read(name), again.read(name))
    assert not np.array_equal(first.read(name), other.read(name))
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    assert RandomWeights(tiny_config(num_hidden_layers=3), 0).fingerprint() != first.fingerprint()


def test_all_tensors_differ_and_are_sanely_scaled(tiny_config):
    config = tiny_config(hidden_size=256, intermediate_size=512, vocab_size=300, num_hidden_layers=2)
    source = RandomWeights(config, 0)
    seen = set()
    for name in source.names():
        values = source.read(name)
        assert values.dtype == np.float32
        assert values.shape == source.shape(name)
        assert np.isfinite(values).all()
        seen.add(values.tobytes())
        if values.ndim == 1:
            assert abs(values.mean() - 1) < 0.05
        elif "q_proj" in name or "lm_head" in name:
            assert values.std() == pytest.approx(1 / 16, rel=0.05)
        elif "o_proj" in name or "down_proj" in name:
            assert values.std() == pytest.approx(values.shape[1] ** -0.5 / 2, rel=0.05)
    assert len(seen) == len(source.names())


def test_blocks_of_one_tensor_differ(tiny_config, monkeypatch):
    monkeypatch.setattr(random_weights, "_BLOCK_ELEMENTS", 64)
    rows = RandomWeights(tiny_config(), 0).read("model.embed_tokens.weight")
    assert len({row.tobytes() for row in rows}) == 50


def test_invalid_seeds_and_row_ranges_are_refused(tiny_config):
    with pytest.raises(InputError, match="seed"):
        RandomWeights(tiny_config(), -1)
    with pytest.raises(ValueError, match="rows"):
        RandomWeights(tiny_config(), 0).read_rows("model.norm.weight", 3, 65)
