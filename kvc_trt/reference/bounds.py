"""Per-page minimum and maximum of the stored keys, and the append that keeps them up to date.

Bounds may be kept in fp8 (E5M2: 5 bits of exponent, 2 of mantissa). They are then rounded outward, so that a bound may
promise more than the keys of its page hold, but never less.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvc_trt.reference import checks

LARGEST_FP8 = 57344.0


def page_bounds(keys: Tensor, lengths: Tensor, page_size: int, *, fp8: bool = False) -> tuple[Tensor, Tensor]:
    """Return the element-wise extremes of each page of `page_size` consecutive slots, ignoring empty slots.

    keys [B,G,C,D], lengths [B] -> page_min, page_max [B,G,P,D] with P = ceil(C / page_size). An empty page is
    (+inf, -inf); a NaN in a page makes that channel's bounds NaN. With `fp8` bounds are `rounded_outward`.
    """
    checks.tensor("keys", keys, "[B,G,C,D]", None, None, None, None)
    checks.number("page_size", page_size, 1)
    batch, heads, slots, size = keys.shape
    checks.lengths("lengths", lengths, batch, 0, slots)
    pages = -(-slots // page_size)
    empty = torch.arange(slots, device=keys.device) >= lengths[:, None]
    extremes = []
    for fill, reduce in ((torch.inf, torch.amin), (-torch.inf, torch.amax)):
        padded = keys.new_full((batch, heads, pages * page_size, size), fill)
        padded[:, :, :slots] = keys.masked_fill(empty[:, None, :, None], fill)
        extremes.append(reduce(padded.view(batch, heads, pages, page_size, size), dim=3))
    return rounded_outward(extremes[0], extremes[1]) if fp8 else (extremes[0], extremes[1])


def rounded_outward(page_min: Tensor, page_max: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest fp8 (E5M2) numbers that are not above `page_min` and not below `page_max`, of the same type.

    Beyond +-57344, the largest, they are those; NaN gives the widest bounds. An empty page stays (+inf, -inf).
    """
    return -rounded_up(-page_min), rounded_up(page_max)


def fp8_codes(maxima: Tensor) -> Tensor:
    """Return maxima, rounded up, as a cache keeps them: the bits of their E5M2 numbers, INT8."""
    finite = rounded_up(maxima).clamp(min=-LARGEST_FP8)
    return finite.to(torch.float8_e5m2).view(torch.int8)


def rounded_up(values: Tensor) -> Tensor:
    """Return the smallest fp8 (E5M2) numbers that are not below `values`, of the same type.

    Beyond +-57344 they are that; NaN gives 57344; minus infinity, the maximum of an empty page, stays.
    """
    wide = values.double().nan_to_num(nan=LARGEST_FP8).clamp(-LARGEST_FP8, LARGEST_FP8)
    _, exponents = torch.frexp(wide)
    steps = torch.ldexp(torch.ones_like(wide), exponents.clamp(min=-13) - 3)  # two bits below the leading one
    raised = torch.ceil(wide / steps) * steps + 0.0  # no -0
    return torch.where(values == -torch.inf, -torch.inf, raised).to(values.dtype)


def append(
    keys: Tensor, values: Tensor, page_min: Tensor, page_max: Tensor, lengths: Tensor, k_new: Tensor, v_new: Tensor,
    *, page_size: int, fp8: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Store one token per row at slot lengths[b] and widen the bounds of its page (algorithm 4, step 1).

    keys, values [B,G,C,D]; page_min, page_max [B,G,P,D]; lengths [B], each < C: the length before the append;
    k_new, v_new [B,G,D]. Returns new (keys, values, page_min, page_max); the caller increments its lengths. With `fp8`
    the page's bounds are `rounded_outward`.
    """
    checks.tensor("keys", keys, "[B,G,C,D]", None, None, None, None)
    batch, heads, slots, size = keys.shape
    checks.number("page_size", page_size, 1)
    bounds = (batch, heads, -(-slots // page_size), size)
    wanted = (
        ("values", values, tuple(keys.shape)),
        ("page_min", page_min, bounds),
        ("page_max", page_max, bounds),
        ("k_new", k_new, (batch, heads, size)),
        ("v_new", v_new, (batch, heads, size)),
    )
    for name, value, shape in wanted:
        checks.tensor(name, value, f"{list(shape)} of {keys.dtype}", *shape, dtype=keys.dtype)
    checks.lengths("lengths", lengths, batch, 0, slots - 1)
    copies = keys.clone(), values.clone(), page_min.clone(), page_max.clone()
    append_in_place(copies, lengths, k_new, v_new, page_size=page_size, fp8=fp8)
    return copies


Tables = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Keys and values of a cache [B,G,C,D], and the bounds of its pages [B,G,P,D]; None without pages."""


def append_in_place(
    tables: Tables, lengths: Tensor, k_new: Tensor, v_new: Tensor, *, page_size: int, fp8: bool = False
) -> None:
    """`append` into the caller's own tables, unchecked (the decoder owns its cache)."""
    keys, values, page_min, page_max = tables
    for row, slot in enumerate(lengths.tolist()):
        keys[row, :, slot], values[row, :, slot] = k_new[row], v_new[row]
        if page_min is not None and page_max is not None:
            page = slot // page_size
            key = rounded_outward(k_new[row], k_new[row]) if fp8 else (k_new[row], k_new[row])
            page_min[row, :, page] = torch.minimum(page_min[row, :, page], key[0])
            page_max[row, :, page] = torch.maximum(page_max[row, :, page], key[1])
