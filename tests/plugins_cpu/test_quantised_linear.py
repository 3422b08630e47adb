"""KvcQuantisedLinear by the native library: the error is that of rounding the input, for every instruction set."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.backends.onnxruntime.native import load
from kvc_trt.models.quantisation import dequantise
from kvc_trt.operators.quantised_linear import QUANTISED_LINEAR
from kvc_trt.operators.shapes import HeadShape, Layout
from tests.graph.small_models import normal
from tests.plugins_cpu.libraries import ANY_INSTRUCTIONS, use_at_most
from tests.plugins_cpu.native_node import NativeNode

BODY = QUANTISED_LINEAR.body(Layout(HeadShape(4, 2, 16)))


WIDE = pytest.mark.parametrize("wide", [False, True], ids=["8 bits", "15 bits"])


def attributes(inputs: int, outputs: int, bits: int, *, wide: bool = False) -> dict[str, int]:
    return {"in_features": inputs, "out_features": outputs, "bits": bits, "block": 32, "wide_input": int(wide)}


def matrix(seed: int, outputs: int, inputs: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return every level and scales of both signs, some of them zero or denormal."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (outputs, inputs // 32, 4 * bits), dtype=np.uint8)
    scales = rng.choice([1, -1, 0, 2**-8, 2**-24], (outputs, inputs // 32)) * rng.uniform(0.5, 1)
    return packed, scales.astype(np.float16)


def assert_right(
    found: np.ndarray, x: np.ndarray, packed: np.ndarray, scales: np.ndarray, bits: int, *, wide: bool = False
) -> None:
    """Half a step of rounding the input, or of rounding what that left, and float32's rounding of the sums."""
    values = dequantise(packed, scales, bits).astype(np.float64)
    steps = np.abs(x).reshape(len(x), -1, 32).max(axis=2) / 127
    bound = np.repeat(steps / 2 / (254 if wide else 1), 32, axis=1) @ np.abs(values.T)
    sums = 2e-6 * np.repeat(127 * steps, 32, axis=1) @ np.abs(values.T) if wide else 0.0
    assert (np.abs(found - x.astype(np.float64) @ values.T) <= 1.001 * bound + sums + 1e-30).all()


@pytest.mark.pairwise
@WIDE
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"),
    [(1, 576, 100), (8, 544, 33), (9, 64, 1), (35, 1056, 70), (1, 32, 3), (20, 2048, 257)],
)
def test_results_are_within_the_bound(
    library: Path, instructions: str, threads: int, tokens: int, inputs: int, outputs: int, bits: int, wide: bool
) -> None:
    native = NativeNode(BODY, attributes(inputs, outputs, bits, wide=wide), library, threads)
    packed, scales = matrix(tokens, outputs, inputs, bits)
    x = normal(1, tokens, inputs)
    assert_right(native(x, packed, scales)["y"], x, packed, scales, bits, wide=wide)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 20), st.integers(1, 40), st.integers(1, 80), st.sampled_from([4, 8]), st.booleans(),
    st.integers(0, 1000), ANY_INSTRUCTIONS,
)  # fmt: skip
def test_random_shapes_are_within_the_bound(
    library: Path, tokens: int, blocks: int, outputs: int, bits: int, wide: bool, seed: int, instructions: str
) -> None:
    use_at_most(library, instructions)
    native = NativeNode(BODY, attributes(32 * blocks, outputs, bits, wide=wide), library)
    packed, scales = matrix(seed, outputs, 32 * blocks, bits)
    x = normal(seed, tokens, 32 * blocks)
    assert_right(native(x, packed, scales)["y"], x, packed, scales, bits, wide=wide)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tokens", [2, 20])
def test_products_of_extremes_are_exact(library: Path, instructions: str, bits: int, tokens: int) -> None:
    """The lowest and highest levels with inputs of -127 and 127 in every order: sums that are narrower than 32 bits
    would overflow first."""
    rng = np.random.default_rng(7)
    lengths = (1, 2, 3, 4, 8, 16, 32)
    signs = np.array([np.where(np.arange(64) // length % 2, 1, -1) for length in lengths])
    signs = np.concatenate([signs, -signs, rng.choice([-1, 1], (tokens, 64))])
    highest = 2**bits - 1
    levels = np.where(signs > 0, highest, 0).astype(np.uint8)
    packed = levels if bits == 8 else levels[:, ::2] | levels[:, 1::2] << 4
    packed = packed.reshape(len(levels), 2, 4 * bits)
    x = (127 * signs[:tokens]).astype(np.float32)
    native = NativeNode(BODY, attributes(64, len(levels), bits), library)
    found = native(x, packed, np.ones((len(levels), 2), np.float16))["y"]
    assert found.tolist() == (x.astype(int) @ (levels.astype(int) - 2 ** (bits - 1)).T).tolist()


@pytest.mark.pairwise
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tokens", [2, 40])
def test_the_input_is_rounded_to_8_bits_by_blocks(library: Path, instructions: str, bits: int, tokens: int) -> None:
    """A product without rounding, or with one scale for a token, differs by half a percent of the largest result."""
    native = NativeNode(BODY, attributes(256, 48, bits), library)
    packed, scales = matrix(3, 48, 256, bits)
    x = normal(4, tokens, 256)
    blocks = x.astype(np.float64).reshape(tokens, -1, 32)
    steps = np.abs(blocks).max(axis=2, keepdims=True) / 127
    rounded = (np.rint(blocks / steps) * steps).reshape(tokens, -1)
    expected = rounded @ dequantise(packed, scales, bits).astype(np.float64).T
    found = native(x, packed, scales)["y"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@WIDE
@pytest.mark.parametrize("bits", [4, 8])
def test_a_token_is_the_same_alone_and_among_others_and_on_any_threads(
    library: Path, instructions: str, bits: int, wide: bool
) -> None:
    """By vector as by panel, a block's products are added before they are scaled."""
    packed, scales = matrix(5, 300, 672, bits)
    x = normal(6, 37, 672)
    one, two = (NativeNode(BODY, attributes(672, 300, bits, wide=wide), library, threads) for threads in (1, 2))
    together = one(x, packed, scales)["y"]
    np.testing.assert_array_equal(two(x, packed, scales)["y"], together)
    for token in range(len(x)):
        np.testing.assert_array_equal(one(x[token : token + 1], packed, scales)["y"][0], together[token])


@WIDE
def test_a_prompt_of_several_chunks_is_its_tokens(library: Path, instructions: str, wide: bool) -> None:
    packed, scales = matrix(7, 40, 64, 4)
    x = normal(8, 2100, 64)
    native = NativeNode(BODY, attributes(64, 40, 4, wide=wide), library, 2)
    whole = native(x, packed, scales)["y"]
    np.testing.assert_array_equal(native(x[1500:2100], packed, scales)["y"], whole[1500:])


@WIDE
def test_zeros_give_zeros(library: Path, instructions: str, wide: bool) -> None:
    packed, scales = matrix(9, 40, 64, 4)
    native = NativeNode(BODY, attributes(64, 40, 4, wide=wide), library)
    assert not native(np.zeros((3, 64), np.float32), packed, scales)["y"].any()


@pytest.mark.pairwise
@WIDE
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tokens", [2, 20])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_nan_input_spoils_its_token_and_no_other(
    library: Path, instructions: str, value: float, tokens: int, bits: int, wide: bool
) -> None:
    packed, scales = matrix(10, 40, 96, bits)
    native = NativeNode(BODY, attributes(96, 40, bits, wide=wide), library)
    clean = normal(11, tokens, 96)
    expected = native(clean, packed, scales)["y"]
    for place in (0, 5, 31, 32, 63, 95):
        x = clean.copy()
        x[1, place] = value
        found = native(x, packed, scales)["y"]
        assert np.isnan(found[1]).all(), place
        np.testing.assert_array_equal(np.delete(found, 1, axis=0), np.delete(expected, 1, axis=0))


def test_another_instruction_set_in_the_middle_of_a_call_does_not_change_it(library: Path) -> None:
    """Each set orders rounded tokens in its own way, so a call computes with one of them throughout."""
    packed, scales = matrix(12, 8, 16384, 4)
    x = normal(13, 8, 16384)
    native = NativeNode(BODY, attributes(16384, 8, 4), library)
    loaded, done = load(library), Event()
    before = loaded.instructions

    def change() -> None:
        while not done.is_set():
            for name in (before, "portable"):
                loaded.use_instructions(name)

    other = Thread(target=change)
    other.start()
    try:
        for _ in range(300):
            assert_right(native(x, packed, scales)["y"], x, packed, scales, 4)
    finally:
        done.set()
        other.join()
        loaded.use_instructions(before)


class OfBefore(NativeNode):
    """A node as engines had it before there were wide inputs."""

    def model(self, types):
        model = super().model(types)
        (node,) = model.graph.node
        (width,) = [one for one in node.attribute if one.name == "wide_input"]
        node.attribute.remove(width)
        return model


def test_a_node_without_a_width_rounds_to_8_bits(library: Path) -> None:
    packed, scales = matrix(14, 40, 64, 4)
    x, narrow = normal(15, 3, 64), attributes(64, 40, 4)
    found, expected = (kind(BODY, narrow, library)(x, packed, scales)["y"] for kind in (OfBefore, NativeNode))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 5}, "attribute bits: expected 4 or 8, found 5"),
        ({"block": 64}, "attribute block: expected 32, found 64"),
        ({"in_features": 48}, "attribute in_features: expected a multiple of 32, found 48"),
        ({"out_features": 41}, "attribute out_features: expected Out = 40, found 41"),
        ({"bits": 8}, "attribute bits: expected Bytes = 16, found 32"),
    ],
)
def test_attributes_that_do_not_fit_are_refused(library: Path, changes: dict[str, int], message: str) -> None:
    native = NativeNode(BODY, {**attributes(64, 40, 4), **changes}, library)
    with pytest.raises(Exception, match=message):
        native(normal(1, 3, 64), *matrix(1, 40, 64, 4))
