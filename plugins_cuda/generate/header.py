"""The parts of the C ABI that follow from the schemas: the largest sizes, and the parameter structs."""

from __future__ import annotations

from kvc_trt.kernels.parameters import kernel_of, members
from kvc_trt.kernels.rotated import LIBRARY_OPERATORS
from kvc_trt.operators.dimensions import MAX_GROUP, MAX_HEAD_SIZE, SIZES
from kvc_trt.operators.schema import Operator


def limits_header() -> str:
    """The text of limits.h: kernels size their shared memory by these limits."""
    return f"""/* The largest sizes that the kernels serve. A call beyond one of them is refused. */
#ifndef KVC_LIMITS_H
#define KVC_LIMITS_H

#define KVC_LARGEST_HEAD_SIZE {MAX_HEAD_SIZE} /* D */
#define KVC_LARGEST_GROUP {MAX_GROUP} /* H / G: query heads of a KV head */

#endif
"""


def parameters_header() -> str:
    """The text of parameters.h: one struct per operation."""
    return f"""/* The parameters of every operation. A value outside of its range is refused, by the name of its member.
 *
 * Symbols: {_symbols()}
 * All tensors are contiguous except those whose strides are given. */
#ifndef KVC_PARAMETERS_H
#define KVC_PARAMETERS_H

#include "kvc/types.h"

#ifdef __cplusplus
extern "C" {{
#endif

{"".join(map(_struct, LIBRARY_OPERATORS))}
#ifdef __cplusplus
}}
#endif
#endif
"""


def _struct(operator: Operator) -> str:
    name = kernel_of(operator).struct
    lines = "\n".join(f"{member.type} {member.name}; /* {member.comment} */" for member in members(operator))
    return f"/* {operator.summary} */\ntypedef struct {name} {{\n{lines}\n}} {name};\n\n"


def _symbols() -> str:
    named = {symbol for one in LIBRARY_OPERATORS for tensor in one.tensors for symbol in tensor.shape}
    words = [f"{symbol} {size.words}" for symbol, size in SIZES.items() if symbol in named - {"2D", "C+M", "D/2"}]
    half = (len(words) + 1) // 2
    derived = f"P = {SIZES['P'].rule}."
    return ", ".join(words[:half]) + ",\n * " + ", ".join(words[half:]) + f".\n * {derived}"
