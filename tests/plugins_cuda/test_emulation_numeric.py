"""The emulation's number formats and tensor cores against numpy, ml_dtypes and a plain matrix product."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest

from tests.plugins_cuda import toys
from tests.plugins_cuda.toys import Toys, aligned

FORMATS = {"half": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
EVERY = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
FP8 = np.dtype(ml_dtypes.float8_e5m2)
FINITE_CODES = np.array([code for code in range(256) if code % 128 < 0x7C], np.uint8)


@pytest.fixture(scope="session")
def toy_library() -> Toys:
    return toys.toys()


def _count(array: np.ndarray) -> ctypes.c_int64:
    return ctypes.c_int64(array.size)


def _narrow(toy_library: Toys, name: str, values: np.ndarray) -> np.ndarray:
    out = np.zeros(values.size, np.uint16)
    toy_library.call(f"narrow_{name}", np.ascontiguousarray(values), out, _count(values))
    return out


@pytest.mark.parametrize("name", FORMATS)
def test_every_number_widens_exactly(toy_library, name):
    wide = np.zeros(EVERY.size, np.float32)
    toy_library.call(f"widen_{name}", EVERY, wide, _count(EVERY))
    expected = EVERY.view(FORMATS[name]).astype(np.float32)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(wide), nan)
    np.testing.assert_array_equal(wide.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


def test_every_code_of_fp8_widens_exactly(toy_library):
    codes = FINITE_CODES.copy()
    wide = np.zeros(codes.size, np.float32)
    toy_library.call("widen_fp8", codes, wide, _count(codes))
    np.testing.assert_array_equal(wide.view(np.uint32), codes.view(FP8).astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("name", FORMATS)
def test_pairs_of_codes_widen_exactly(toy_library, name):
    """Every code in either half of a register, subnormal ones too, whatever is in the lower bytes."""
    one, other = (grid.ravel().astype(np.uint32) for grid in np.meshgrid(FINITE_CODES, FINITE_CODES))
    junk = np.random.default_rng(1).integers(0, 2**32, one.size, dtype=np.uint32) & 0x00FF00FF
    wide = np.zeros(one.size, np.uint32)
    toy_library.call(f"widen_bytes_{name}", one << 8 | other << 24 | junk, wide, _count(one))
    found = wide.view(FORMATS[name]).reshape(-1, 2).astype(np.float32)
    expected = np.stack([one, other], axis=1).astype(np.uint8).view(FP8).astype(np.float32)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("stored", [np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.int8)], ids=["fp8", "int8"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_code_of_a_stored_vector_widens_exactly(toy_library, name, stored):
    """At every channel, beside every other code: of its own vector, and of another vector's same channel."""
    every = np.array([code for code in range(256) if not np.isnan(np.uint8(code).view(stored).astype(np.float32))])
    one, other = (grid.ravel().astype(np.uint8) for grid in np.meshgrid(every, every))
    fill = -one.size % 8
    vectors = np.stack([np.pad(one, (0, fill)), np.pad(other, (0, fill))], axis=1)  # neighbours are pairs
    vectors = np.concatenate([vectors.reshape(-1, 8), vectors.reshape(-1, 8)[:, ::-1]])
    shifted = np.stack([vectors, np.roll(vectors, 1, axis=0)], axis=1).reshape(-1, 8)
    across = np.stack([one, other], axis=1)[np.newaxis].repeat(8, axis=0)  # [channel, pair of codes, vector]
    across = across.transpose(1, 2, 0).reshape(-1, 8)
    for units in (np.ascontiguousarray(shifted), np.ascontiguousarray(across)):
        pairs, channels = np.zeros((len(units), 4), np.uint32), np.zeros((len(units) // 2, 8), np.uint32)
        fp8 = ctypes.c_int(stored != np.int8)
        toy_library.call(f"widen_codes_{name}", fp8, units, pairs, channels, ctypes.c_int64(len(units)))
        expected = units.view(stored).astype(np.float32)
        found = pairs.view(FORMATS[name]).reshape(-1, 8).astype(np.float32)
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
        found = channels.view(FORMATS[name]).reshape(-1, 8, 2).astype(np.float32)
        expected = np.ascontiguousarray(expected.reshape(-1, 2, 8).transpose(0, 2, 1))
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", FORMATS)
def test_every_number_survives_the_way_there_and_back(toy_library, name):
    numbers = EVERY.view(FORMATS[name])
    nan = np.isnan(numbers.astype(np.float32))
    back = _narrow(toy_library, name, numbers.astype(np.float32))
    np.testing.assert_array_equal(back[~nan], EVERY[~nan])
    assert (back[nan] & 0x7FFF == 0x7FFF).all()


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_to_nearest_even(toy_library, name):
    """Around the middle of every two neighbours, one fp32 step to either side, and at random bit patterns."""
    infinity = np.array(np.inf, FORMATS[name]).view(np.uint16)
    positive = EVERY[: int(infinity)].view(FORMATS[name]).astype(np.float64)
    middle = np.append((positive[1:] + positive[:-1]) / 2, 2 * positive[-1] - (positive[-1] + positive[-2]) / 2)
    middle = middle.astype(np.float32)  # exact: one bit more than the format has
    random = np.random.default_rng(3).integers(0, 2**32, 2**20, dtype=np.uint32).view(np.float32)
    steps = [np.nextafter(middle, np.float32(s)) for s in (-np.inf, np.inf)]
    values = np.concatenate([middle, *steps, random])
    values = np.concatenate([values, -values])
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(FORMATS[name])
    nan = np.isnan(values)
    got = _narrow(toy_library, name, values)
    np.testing.assert_array_equal(got[~nan], expected.view(np.uint16)[~nan])
    assert (got[nan] == 0x7FFF).all()


def test_order_keys_ascend_with_the_value(toy_library):
    halves = EVERY.view(np.float16).astype(np.float32)
    denormals = np.array([1e-45, -1e-45, 1e-40, 3.4e38, -3.4e38], np.float32)
    values = np.unique(np.concatenate([halves[~np.isnan(halves)], denormals]))  # ascending, one zero
    keys = np.zeros(values.size, np.uint32)
    toy_library.call("order_keys", values, keys, _count(values))
    assert (np.diff(keys.astype(np.int64)) > 0).all()
    special = np.array([0.0, -0.0, np.nan, -np.nan, -np.inf], np.float32)
    keys = np.zeros(special.size, np.uint32)
    toy_library.call("order_keys", special, keys, _count(special))
    assert keys[0] == keys[1]
    assert keys[2] == keys[3] == 0
    assert keys[4] > 0


def test_a_maximum_lets_nan_win(toy_library):
    one = np.array([0.0, 1.0, -1.0, np.nan, np.inf, -np.inf, 1e-45], np.float32)
    a, b = (np.ascontiguousarray(grid.ravel()) for grid in np.meshgrid(one, one))
    larger = np.zeros_like(a)
    toy_library.call("maxima", a, b, larger, _count(a))
    np.testing.assert_array_equal(larger, np.maximum(a, b))


def test_lowest_finite_number_of_each_type_is_numpys(toy_library):
    lowest = np.zeros(4, np.float32)
    toy_library.call("lowest", lowest)
    formats = (*map(np.finfo, (np.float32, np.float16)), *map(ml_dtypes.finfo, ("bfloat16", "float8_e5m2")))
    assert lowest.tolist() == [float(info.min) for info in formats]


@pytest.mark.parametrize(("number", "dtype"), list(enumerate([np.dtype(np.float32), *FORMATS.values()])))
def test_vectors_are_whole_and_aligned(toy_library, number, dtype):
    width = 16 // dtype.itemsize
    source = aligned(2 * width, dtype)
    source[:] = np.arange(1, 2 * width + 1)
    converted, copied = aligned(width, dtype), aligned(width, dtype)
    assert toy_library.run("run_vectors", number, source, converted, copied) == ""
    np.testing.assert_array_equal(converted, source[:width])
    np.testing.assert_array_equal(copied, source[:width])
    assert "misaligned 16-byte access" in toy_library.run("run_vectors", number, source[1:], converted, copied)
    assert "misaligned 16-byte access" in toy_library.run("run_vectors", number, source, converted, source[1:])


@pytest.mark.parametrize("name", FORMATS)
def test_fragments_multiply_as_matrices(toy_library, name):
    """Tries B by rows and by columns; the numbers are whole, so sums are exact."""
    dtype = FORMATS[name]
    random = np.random.default_rng(0)
    a, b, columns = aligned((16, 16), dtype), aligned((16, 8), dtype), aligned((8, 16), dtype)
    a[:] = random.integers(-8, 9, a.shape)
    b[:] = random.integers(-8, 9, b.shape)
    columns[:] = b.T
    expected = a.astype(np.float32) @ b.astype(np.float32)
    products = np.full((3, 16, 8), np.nan, np.float32)
    assert toy_library.run("run_product", int(name == "bfloat16"), a, b, columns, products, 1) == ""
    for product in products:
        np.testing.assert_array_equal(product, expected)

    assert toy_library.run("run_product", int(name == "bfloat16"), a, b, columns, products, 0) == ""
    assert np.isnan(products[1]).all(), "a copy without a wait has not arrived"
    np.testing.assert_array_equal(products[0], expected)
