"""One call of the C ABI: its parameter struct from sizes, attributes and addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvc_trt.backends.tensorrt.twins.sizes import Sizes
from kvc_trt.backends.tensorrt.twins.tables import Operator
from kvc_trt.kernels.structs import Dtype, Parameters

SCALARS: Mapping[str, str] = {
    "batch": "B", "heads": "H", "kv_heads": "G", "head_size": "D", "window": "W", "prompt_length": "S", "capacity": "C",
    "selected_width": "K",
}  # fmt: skip
"""Numbers of the structs that are sizes; every other one is an attribute or comes from `Operator.extra`."""


class Kernels(Protocol):
    """What is called of a kernel library (kvc_trt.kernels.c_library.CLibrary)."""

    def workspace_bytes(self, operation: str, params: Parameters) -> int:
        """Scratch memory for these sizes."""

    def call(
        self, operation: str, params: Parameters, workspace: int | None, workspace_bytes: int, stream: int | None = None
    ) -> None:
        """One call of the C ABI as it is."""


@dataclass(frozen=True)
class Call:
    """What the C ABI wants to know besides addresses."""

    operator: Operator
    fields: Mapping[str, int]
    sizes: Sizes
    dtype: Dtype

    def workspace_bytes(self, kernels: Kernels) -> int:
        """Scratch memory; KernelError with the C ABI's reason where it refuses the sizes."""
        return kernels.workspace_bytes(self.operator.operation, self._parameters({}))

    def launch(
        self, kernels: Kernels, inputs: Sequence[int], outputs: Sequence[int], workspace: int, stream: int
    ) -> None:
        """Queue the kernels on `stream`; addresses are in the order of the tables."""
        params = self._parameters(addresses(self.operator, inputs, outputs))
        kernels.call(self.operator.operation, params, workspace, self.workspace_bytes(kernels), stream)

    def _parameters(self, pointers: Mapping[str, int]) -> Parameters:
        values = {**self.fields, **self.operator.extra(self.sizes), **pointers, "dtype": int(self.dtype)}
        values |= {name: self.sizes[symbol] for name, symbol in SCALARS.items() if symbol in self.sizes}
        names = [name for name, *_ in self.operator.parameters._fields_]
        return self.operator.parameters(**{name: values[name] for name in names if name in values})


def addresses(operator: Operator, inputs: Sequence[int], outputs: Sequence[int]) -> dict[str, int]:
    """Pointers of the struct: what is updated in place has the input's name there, and the output's address."""
    named = dict(zip((tensor.name for tensor in operator.inputs), inputs, strict=True))
    for tensor, address in zip(operator.outputs, outputs, strict=True):
        named[tensor.name if tensor.alias is None else operator.inputs[tensor.alias].name] = address
    return named
