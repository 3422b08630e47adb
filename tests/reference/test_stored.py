"""`store` beside exact arithmetic on fractions, and beside values computed by hand."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from kvc_trt.models.cache_formats import CACHE_FORMATS, VECTOR_FORMATS
from kvc_trt.reference import store

FORMATS = tuple(VECTOR_FORMATS)
HALF_NAN = 0x7E00
numbers = st.one_of(
    st.floats(width=32),
    st.floats(-(2.0**-120), 2.0**-120, width=32),
    st.floats(-300, 300, width=32),
    st.sampled_from(
        [0.0, -0.0, 448.0, -448.0, 449.0, 224.0, 3.5, 1e30, -1e30, 65504.0, 65519.0, 65520.0, 1e-45, 127.0]
    ),
)


def rounded_to_half(number: Fraction) -> float:
    """Return the nearest fp16 number, half to even, of one that is at most 65504; struct rounds doubles once."""
    return float(np.float64(struct.unpack("<e", struct.pack("<e", float(number)))[0]))


def single(number: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(number))


def half_even(number: float) -> int:
    return round(Fraction(number)) if math.isfinite(number) else (10**9 if number > 0 else -(10**9))


def e4m3(number: float) -> int:
    """Return the byte of the nearest E4M3 number, half to even, found among all of them."""
    sign = 0x80 if math.copysign(1.0, number) < 0 else 0
    size = Fraction(abs(number))
    every = [
        Fraction(m, 512) if e == 0 else Fraction(8 + m, 8) * Fraction(2) ** (e - 7) for e in range(16) for m in range(8)
    ]
    best = min(range(127), key=lambda code: (abs(every[code] - size), code % 2))
    return sign | best


def expected_int8(vector: list[float]) -> tuple[list[int], list[float], list[float] | None]:
    largest = max(abs(x) for x in vector)
    scale = rounded_to_half(Fraction(min(single(largest / 127), 65504.0))) or 1.0
    return [max(-127, min(127, half_even(single(x / scale)))) for x in vector], [scale], None


def expected_fp8(vector: list[float]) -> tuple[list[int], list[int], None]:
    largest = Fraction(max(abs(x) for x in vector))
    exponent = -127
    while largest > 448 * Fraction(2) ** exponent:
        exponent += 1
    if largest == 0:
        exponent = 0
    return (
        [e4m3(math.copysign(float(abs(Fraction(x)) / Fraction(2) ** exponent), x)) for x in vector],
        [exponent + 127],
        None,
    )


def expected_int4(vector: list[float]) -> tuple[list[int], list[float], list[float]]:
    groups = [vector[i : i + 32] for i in range(0, len(vector), 32)] if len(vector) % 32 == 0 else [vector]
    codes, scales, minima = [], [], []
    for group in groups:
        least, most = min(group), max(group)
        minimum = rounded_to_half(Fraction(max(-65504.0, min(65504.0, least))))
        spread = single(most - least)
        scale = rounded_to_half(Fraction(min(single(spread / 15), 65504.0))) or 1.0
        codes += [max(0, min(15, half_even(single(single(x - minimum) / scale)))) for x in group]
        scales.append(scale)
        minima.append(minimum)
    return codes, scales, minima


EXPECTED = {"int8": expected_int8, "fp8": expected_fp8, "int4": expected_int4}


@pytest.mark.parametrize("format", FORMATS)
@given(data=st.data(), size=st.sampled_from([2, 6, 32, 64]))
def test_codes_and_scales_have_the_bits_of_the_formula(format, data, size):
    vector = data.draw(st.lists(numbers, min_size=size, max_size=size))
    found = store(torch.tensor([vector]), format=format)
    codes = found.codes.view(torch.uint8) if format == "fp8" else found.codes
    if not all(map(math.isfinite, vector)):
        assert not codes.any()
        assert found.values().isnan().all()
        bits = found.scales.view(torch.uint8 if format == "fp8" else torch.int16)
        assert set(bits.flatten().tolist()) == {255 if format == "fp8" else HALF_NAN}
        return
    expected_codes, scales, minima = EXPECTED[format]([single(x) + 0.0 for x in vector])
    assert codes[0].tolist() == expected_codes
    assert found.scales[0].tolist() == scales
    assert (found.minima is None) == (minima is None)
    if minima is not None and found.minima is not None:
        assert found.minima[0].tolist() == minima


@pytest.mark.parametrize(
    ("format", "vector", "codes", "scales", "minima", "values"),
    [
        # 254 / 127 = 2; 3 / 2 and 1 / 2 are halves: to the even code
        ("int8", [254.0, 3.0, 1.0, -254.0], [127, 2, 0, -127], [2.0], None, [254.0, 4.0, 0.0, -254.0]),
        ("int8", [0.0, 0.0, 0.0, 0.0], [0, 0, 0, 0], [1.0], None, [0.0] * 4),
        # 448 fits without an exponent, 449 needs one; 17 lies between 16 and 18
        ("fp8", [448.0, 17.0, -2.0, 0.0], [0x7E, 0x58, 0xC0, 0], [127], None, [448.0, 16.0, -2.0, 0.0]),
        ("fp8", [449.0, 17.0, -2.0, 0.0], [0x76, 0x50, 0xB8, 0], [128], None, [448.0, 16.0, -2.0, 0.0]),
        # the range of 30 has 15 steps of 2; 5.0 is 2.5 + 1 steps above -3: to the even code
        ("int4", [-3.0, 27.0, 5.0, 2.0], [0, 15, 4, 2], [2.0], [-3.0], [-3.0, 27.0, 5.0, 1.0]),
        ("int4", [7.0, 7.0, 7.0, 7.0], [0, 0, 0, 0], [1.0], [7.0], [7.0] * 4),
    ],
)  # fmt: skip
def test_codes_scales_and_values_match_hand_computed_ones(format, vector, codes, scales, minima, values):
    found = store(torch.tensor(vector), format=format)
    assert (found.codes.view(torch.uint8) if format == "fp8" else found.codes).tolist() == codes
    assert found.scales.tolist() == scales
    assert (None if found.minima is None else found.minima.tolist()) == minima
    assert found.values().tolist() == values


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("spoiled", [math.nan, math.inf, -math.inf])
def test_a_vector_that_is_not_finite_changes_no_other(format, spoiled):
    clean = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1))
    given_one = clean.clone()
    given_one[1, 2, 7] = spoiled
    whole, changed = store(clean, format=format).values(), store(given_one, format=format).values()
    assert changed[1, 2].isnan().all()
    changed[1, 2] = whole[1, 2]
    assert changed.equal(whole)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("head_size", [2, 48, 64, 80, 128])
def test_bytes_of_a_vector_are_those_of_the_table(format, head_size):
    found = store(torch.randn(3, head_size), format=format)
    numbers = found.scales.nbytes + (0 if found.minima is None else found.minima.nbytes)
    code_bits = found.codes.numel() * VECTOR_FORMATS[format].code_bits
    assert code_bits // 8 + numbers == 3 * VECTOR_FORMATS[format].bytes_per_vector(head_size)


def test_numbers_of_half_precision_are_widened_first():
    given_one = torch.randn(4, 64).to(torch.bfloat16)
    for format in FORMATS:
        assert store(given_one, format=format).values().equal(store(given_one.float(), format=format).values())


def test_invalid_formats_and_shapes_are_refused_in_one_line():
    with pytest.raises(ValueError, match="format is 'int3'; expected one of int8, fp8, int4"):
        store(torch.zeros(4), format="int3")
    with pytest.raises(ValueError, match="expected an even number of channels, found 5"):
        store(torch.zeros(5), format="int4")
    for shape in ((), (3, 0)):
        with pytest.raises(ValueError, match=r"expected vectors \[..., D\] that have channels, found shape"):
            store(torch.zeros(shape), format="int8")


def test_formats_of_caches_have_the_codes_of_the_operators_attribute():
    assert [one.code for one in CACHE_FORMATS.values()] == [0, 1, 2, 3, 4]
    assert {one.name for one in CACHE_FORMATS.values()} == {"auto", "int8", "fp8", "int4", "k8v4"}


def test_the_page_says_how_many_bytes_a_vector_takes():
    page = (Path(__file__).parents[2] / "docs" / "cache-formats.md").read_text()
    for one in CACHE_FORMATS.values():
        if one.keys is not None and one.values is not None:
            sizes = [[vector.bytes_per_vector(size) for vector in (one.keys, one.values)] for size in (64, 128)]
            cells = [" and ".join(map(str, dict.fromkeys(pair))) for pair in sizes]
            assert f"| {one.name} | {one.keys.name} | {one.values.name} | {cells[0]} | {cells[1]} |" in page
