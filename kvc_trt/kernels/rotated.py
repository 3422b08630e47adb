"""Steps of attention that rotate their query and key themselves, so that no launch of its own comes before them.

Operators of the kernel libraries and of `torch.ops.kvc` alone. In a graph, the rotary embedding stands before the
operator, where a compiler can fuse it.
"""

from __future__ import annotations

from dataclasses import replace

from kvc_trt.kernels.parameters import kernel_of
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.attention.hybrid_attention import HYBRID_ATTENTION
from kvc_trt.operators.dimensions import SIZES
from kvc_trt.operators.registry import KERNEL_OPERATORS
from kvc_trt.operators.schema import CACHE, FLOAT, Attribute, Operator, Tensor
from kvc_trt.operators.tensors import K_NEW, QUERY, V_NEW

_H = SIZES["H"]
_HEADS = Attribute("heads", _H.least, _H.most, f"query heads, a multiple of kv_heads, {_H.rule}", bits=_H.bits)
_TOKEN = (
    Tensor("joined", CACHE, ("B", "H+2G", "D"), "queries, keys and values of the new token, before RoPE"),
    Tensor("cosines", FLOAT, ("B", "D/2"), "of the row's position"),
    Tensor("sines", FLOAT, ("B", "D/2")),
)
_FORMULAS = {"H": "heads", "H+2G": "heads + 2 * G"}


def _rotated(operator: Operator) -> Operator:
    """Return the step that takes the joined product in place of query, key and value, and also returns the query."""
    given, kernel = (QUERY, K_NEW, V_NEW), kernel_of(operator)
    assert operator.inputs[: len(given)] == given
    return replace(
        operator,
        name=operator.name.replace("Kvc", "KvcRotated"),
        summary=f"Rotate the new token, then {operator.summary[0].lower()}{operator.summary[1:]}",
        inputs=(*_TOKEN, *operator.inputs[len(given) :]),
        outputs=(*operator.outputs, replace(QUERY, summary="the rotated query")),
        attributes=(_HEADS, *operator.attributes),
        formulas={**_FORMULAS, **operator.formulas},
        write=None,
        kernel=replace(
            kernel,
            operation=kernel.operation.replace("kvc_", "kvc_rotated_"),
            struct=kernel.struct.replace("Kvc", "KvcRotated"),
        ),
    )


ROTATED_HYBRID_ATTENTION = _rotated(HYBRID_ATTENTION)
ROTATED_DENSE_ATTENTION = _rotated(DENSE_ATTENTION)
ROTATED = ((HYBRID_ATTENTION, ROTATED_HYBRID_ATTENTION), (DENSE_ATTENTION, ROTATED_DENSE_ATTENTION))
"""Each plain step with the one that rotates."""
LIBRARY_OPERATORS = (*KERNEL_OPERATORS, *(rotated for _, rotated in ROTATED))
"""Every operator that a kernel library computes."""
