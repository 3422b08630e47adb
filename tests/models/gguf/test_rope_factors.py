from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from kvc_trt.errors import InputError
from kvc_trt.models.gguf.checkpoint import GgufCheckpoint
from kvc_trt.models.gguf.rope_factors import llama3_scaling
from kvc_trt.models.rope import rotary_tables
from tests.models.gguf.tiny import HEAD_SIZE, write


def factors(base, size, factor, length, low=1.0, high=4.0):
    """Section 3.4 of the Llama 3 paper as converters compute it: how much slower each pair turns, float64."""
    made = []
    for exponent in np.arange(0, size, 2) / size:
        wavelength = 2 * np.pi * base**exponent
        if wavelength < length / high:
            made.append(1.0)
        elif wavelength > length / low:
            made.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            made.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(made, np.float32)


@pytest.mark.parametrize(("factor", "size"), [(8.0, 128), (32.0, 64), (32.0, 128)])
def test_llama_31_and_32_have_the_tables_of_transformers(factor, size, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    changes = {"rope.freq_base": 500000.0, "rope.dimension_count": size, "attention.key_length": size}
    path = write(
        tmp_path / "model.gguf", changes=changes, extra={"rope_freqs.weight": factors(500000.0, size, factor, 8192)}
    )
    config = GgufCheckpoint(path).config
    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
    }  # fmt: skip
    theirs = transformers.LlamaConfig(head_dim=size, hidden_size=4 * size, num_attention_heads=4,
                                      max_position_embeddings=131072, rope_parameters=scaling)  # fmt: skip
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    angles = torch.arange(5000).float()[:, None] * inverse[None, :]
    cosine, sine = rotary_tables(config, 5000)
    np.testing.assert_allclose(cosine, angles.cos().numpy(), atol=1e-6)
    np.testing.assert_allclose(sine, angles.sin().numpy(), atol=1e-6)


def test_factors_of_one_mean_no_scaling():
    assert llama3_scaling(np.ones(HEAD_SIZE // 2, np.float32), 10000.0, HEAD_SIZE, "file") is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda table: table * 1.01, "not those of Llama 3.1's rotary scaling"),
        (lambda table: table[:-1], r"shape \[31\], expected \[32\]"),
        (lambda table: table[None], r"shape \[1, 32\], expected \[32\]"),
        (lambda table: table * np.nan, "finite numbers"),
        (lambda table: table / 100, "at least 1"),
    ],
)
def test_other_factors_are_refused(changed, message, tmp_path):
    table = changed(factors(500000.0, HEAD_SIZE, 8.0, 8192)).astype(np.float32)
    path = write(tmp_path / "model.gguf", changes={"rope.freq_base": 500000.0}, extra={"rope_freqs.weight": table})
    with pytest.raises(InputError, match=rf"model\.gguf: tensor rope_freqs\.weight: .*{message}"):
        GgufCheckpoint(path)


def test_a_table_of_another_size_is_refused_before_it_is_read(tmp_path):
    path = write(tmp_path / "model.gguf", extra={"rope_freqs.weight": np.ones(4 << 20, np.float32)})
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=r"rope_freqs\.weight: shape \[4194304\], expected \[32\]"):
            GgufCheckpoint(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
