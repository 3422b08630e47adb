"""The arithmetic of prefill: an option of backends whose processors multiply bfloat16 faster than float32.

Decode, its caches and the stored engine are the same in both.
"""

from __future__ import annotations

from typing import Literal, get_args

from kvc_trt.errors import InputError

PrefillPrecision = Literal["f32", "bf16"]
"""f32 keeps of a prompt what the reference keeps. bf16 rounds what attention and float matrices multiply to 8 bits,
sums in float32, and is judged by verify's bars of bfloat16."""
PREFILL_PRECISIONS: tuple[PrefillPrecision, ...] = get_args(PrefillPrecision)


def check_precision(precision: str, offered: tuple[str, ...], backend: str) -> None:
    """Raise InputError for a precision that a backend does not offer."""
    if precision not in offered:
        raise InputError(f"prefill precision {precision!r} on {backend}; expected {' or '.join(offered)}")
