"""Converts the parameters of a step that rotates its token into those of the plain step after the rotation."""

from __future__ import annotations

from kvc_trt.kernels.parameters import kernel_of, members
from kvc_trt.kernels.rotated import ROTATED
from kvc_trt.operators.schema import Operator


def rotated_header() -> str:
    """The text of rotated_parameters.h: for each operation that rotates, a function that copies the common members."""
    functions = "".join(_function(plain, rotated) for plain, rotated in ROTATED)
    return f"""// The parameters of a step that rotates its token, as those of the plain step with the rotated query.
#pragma once

#include "kvc/parameters.h"

namespace kvc {{

{functions}
}}  // namespace kvc
"""


def _function(plain: Operator, rotated: Operator) -> str:
    struct = kernel_of(plain).struct
    there = {member.name for member in members(rotated)} - {"struct_bytes"}
    copies = "\n".join(f"params.{one.name} = p.{one.name};" for one in members(plain) if one.name in there)
    return f"""inline {struct} with_rotated_query(const {kernel_of(rotated).struct}& p) {{
{struct} params{{}};
{copies}
return params;
}}

"""
