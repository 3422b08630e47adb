from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest

from kvc_trt.errors import InputError
from kvc_trt.models.config import check_length
from kvc_trt.models.presets import list_presets, load_preset
from kvc_trt.models.pretrained_config import to_pretrained_config
from kvc_trt.models.rope import inverse_frequencies, query_scale, rotary_tables
from kvc_trt.models.sources.hugging_face import parse_config

torch = pytest.importorskip("torch")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def tables_of_transformers(config, positions):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": "default", "rope_theta": config.rotary_base}
    if config.rotary_scaling is not None:
        scaling = to_pretrained_config(config)["rotary_scaling"]
        parameters |= scaling
    channels = config.description.rotary_channels or config.head_size
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=channels * 2,
            num_attention_heads=2,
            head_dim=channels,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=parameters,
        )
    )
    theirs.attention_scaling = 1.0  # ours is in the query
    cos, sin = theirs(torch.zeros(1, dtype=torch.float32), torch.from_numpy(positions)[None])
    half = channels // 2
    return theirs.inv_freq.numpy(), cos[0, :, :half].numpy(), sin[0, :, :half].numpy()


@pytest.mark.parametrize("name", list_presets())
def test_tables_of_every_preset_equal_transformers_to_the_last_position(name):
    config = load_preset(name).config
    length = config.max_position_embeddings
    positions = np.unique(np.r_[0:64, np.linspace(0, length - 1, 200).astype(np.int64), length - 4 : length])
    inverse, cos, sin = tables_of_transformers(config, positions)
    ours, still = np.split(inverse_frequencies(config, 20000), [len(inverse)])
    assert not still.any()
    # The float32 pow of torch is off by one unit in the last place for a few exponents, by two for one of base 4e6;
    # ours are rounded correctly.
    if config.rotary_scaling is None:
        powers = config.rotary_base ** (np.arange(len(ours)) / len(ours))
        np.testing.assert_array_equal(ours, 1 / powers.astype(np.float32))
    np.testing.assert_array_max_ulp(ours, inverse, maxulp=2)
    assert (ours == inverse).mean() > 0.9
    our_cos, our_sin = (table[:, : len(ours)] for table in rotary_tables(config, length))
    # An angle is position times frequency in float32: one unit of a frequency moves it, and may round it otherwise.
    angles = positions[:, None] * inverse
    moved = positions[:, None] * np.abs(ours.astype(np.float64) - inverse) + np.spacing(angles.astype(np.float32))
    drift = 3e-7 + np.where(ours == inverse, 0, moved)
    assert (np.abs(our_cos[positions] - cos) <= drift).all()
    assert (np.abs(our_sin[positions] - sin) <= drift).all()


@pytest.mark.parametrize("scaling", [None, {"type": "linear", "factor": 4.0}, LLAMA3, LLAMA3 | {"factor": 32.0}])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_tables_equal_transformers(tiny_config, scaling, head_dim, theta):
    config = tiny_config(head_dim=head_dim, rope_theta=theta, rope_scaling=scaling, max_position_embeddings=20000)
    positions = np.arange(0, 20000, 37)
    inverse, cos, sin = tables_of_transformers(config, positions)
    np.testing.assert_array_equal(inverse_frequencies(config, 20000), inverse)
    our_cos, our_sin = rotary_tables(config, 20000)
    np.testing.assert_allclose(our_cos[positions], cos, rtol=0, atol=3e-7)
    np.testing.assert_allclose(our_sin[positions], sin, rtol=0, atol=3e-7)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707},
        {"mscale": 0.707},
        {"attention_factor": 0.8, "mscale": 1.0, "mscale_all_dim": 0.5},
        {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
        {"original_max_position_embeddings": 64},
        {"original_max_position_embeddings": None},
        {"factor": 1.0},
    ],
)
@pytest.mark.parametrize("theta", [10000.0, 1000000.0])
def test_yarn_equals_transformers(tiny_fields, change, theta):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {name: value for name, value in (YARN | change).items() if value is not None}
    fields = tiny_fields(head_dim=64, rope_theta=theta, rope_scaling=scaling, max_position_embeddings=20000)
    config = parse_config(fields, "it")
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_dict(deepcopy(fields)))
    np.testing.assert_array_max_ulp(inverse_frequencies(config, 20000), theirs.inv_freq.numpy(), maxulp=1)
    scale, found = query_scale(config, 0), theirs.attention_scaling**2
    np.testing.assert_allclose(1.0 if scale is None else scale, found, rtol=1e-6)


LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0 + 0.05 * pair for pair in range(16)],
    "long_factor": [1.5 * 1.2**pair for pair in range(16)], "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("change", [{}, {"factor": 8.0}, {"attention_factor": 1.25}, {"factor": 1.0}])
@pytest.mark.parametrize("longest", [64, 65])
def test_longrope_equals_transformers(tiny_fields, change, longest):
    """The list of factors changes after the original length."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields = tiny_fields(head_dim=32, rope_scaling=LONGROPE | change, max_position_embeddings=512)
    config = parse_config(fields, "it")
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_dict(deepcopy(fields)))
    theirs(torch.zeros(1), torch.arange(longest)[None])
    np.testing.assert_array_max_ulp(inverse_frequencies(config, longest), theirs.inv_freq.numpy(), maxulp=1)
    scale, found = query_scale(config, 0), theirs.attention_scaling**2
    np.testing.assert_allclose(1.0 if scale is None else scale, found, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"long_factor": [1.0] * 15}, "long_factor has 15 numbers, expected 16"),
        ({"short_factor": [0.0] * 16}, "short_factor"),
        ({"rope_type": "yarn", "factor": 4.0}, "long_factor beside yarn, expected the rope_type longrope"),
    ],
)
def test_wrong_factors_are_refused(tiny_fields, change, words):
    with pytest.raises(InputError, match=words):
        parse_config(tiny_fields(head_dim=32, rope_scaling=LONGROPE | change), "it")


def test_dynamic_scaling_ends_where_it_would_begin(tiny_config):
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    config, plain = tiny_config(rope_scaling=scaling, max_position_embeddings=100), tiny_config()
    np.testing.assert_array_equal(inverse_frequencies(config, 100), inverse_frequencies(plain, 100))
    check_length(config, 100, 10)
    with pytest.raises(InputError, match="101 tokens together; dynamic rotary scaling"):
        check_length(config, 101, 10)


def test_llama3_scaling_against_its_definition(tiny_config):
    """Independent of transformers: wavelengths below 2048 unchanged, above 8192 eight times longer."""
    config = tiny_config(head_dim=128, rope_theta=500000.0, rope_scaling=LLAMA3, max_position_embeddings=131072)
    plain = inverse_frequencies(tiny_config(head_dim=128, rope_theta=500000.0), 20000).astype(np.float64)
    scaled = inverse_frequencies(config, 20000).astype(np.float64)
    wavelength = 2 * np.pi / plain
    np.testing.assert_array_equal(scaled[wavelength < 2048], plain[wavelength < 2048])
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-7)
    middle = (wavelength > 2048) & (wavelength < 8192)
    assert middle.any()
    smooth = (8192 / wavelength[middle] - 1) / 3
    expected = (1 - smooth) * plain[middle] / 8 + smooth * plain[middle]
    np.testing.assert_allclose(scaled[middle], expected, rtol=1e-5)


def test_tables_are_float32_and_start_at_position_zero(tiny_config):
    cos, sin = rotary_tables(tiny_config(), 5)
    assert cos.shape == sin.shape == (5, 8)
    assert cos.dtype == sin.dtype == np.float32
    assert (cos[0] == 1).all()
    assert (sin[0] == 0).all()
    with pytest.raises(ValueError, match="length"):
        rotary_tables(tiny_config(), 0)
