"""Products of PyTorch's own kernels with matrices in int4 and fp8, beside the dense product: time and error on a CPU.

    python -m benchmarks.torch.products

The torch backend runs none of these: docs/decisions/0046 says why. The error is that of float64 sums over the
dequantised matrix, as a share of the largest result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks.machine import record

ROWS, SIZE, GROUP = (1, 8, 64), 1024, 32
RUNS = 7
Product = Callable[[Tensor], Tensor]


def milliseconds(product: Product, x: Tensor) -> float:
    """Return the median time of a call."""
    taken = []
    for _ in range(1 + RUNS):
        start = time.perf_counter()
        product(x)
        taken.append(1000 * (time.perf_counter() - start))
    return median(taken[1:])


def in_int4(dtype: torch.dtype) -> tuple[Product, Tensor]:
    """Return the product with a matrix in groups of 32, and the float64 matrix that it stands for."""
    levels = torch.randint(0, 16, (SIZE, SIZE), dtype=torch.int32)
    scales = torch.rand(SIZE, SIZE // GROUP).mul(0.01).half().float()
    exact = ((levels.view(SIZE, -1, GROUP) - 8) * scales[..., None].double()).view(SIZE, SIZE)
    numbers = torch.stack([scales, torch.zeros_like(scales)], -1).transpose(0, 1).contiguous().to(dtype)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x.to(dtype), packed, GROUP, numbers), exact


def in_fp8() -> tuple[Product, Tensor]:
    """Return the product of an input that is rounded to E4M3, a scale for each row, with a matrix in E4M3."""
    matrix, scale = torch.randn(SIZE, SIZE).to(torch.float8_e4m3fn), torch.rand(1, SIZE) + 0.5

    def product(x: Tensor) -> Tensor:
        own = x.abs().amax(1, keepdim=True) / 448
        return torch._scaled_mm((x / own).to(matrix.dtype), matrix.t(), own, scale, out_dtype=torch.float32)

    return product, matrix.double() * scale.double().T


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    found = record()
    print(f"{found['device']}, one thread, PyTorch {torch.__version__}, {SIZE} x {SIZE}, commit {found['commit']}")
    kinds = {"int4, float32": in_int4(torch.float32), "int4, bfloat16": in_int4(torch.bfloat16), "fp8": in_fp8()}
    print("kind            rows   ms  dense ms  error")
    for name, (product, exact) in kinds.items():
        dense = exact.float()
        for rows in ROWS:
            x = torch.randn(rows, SIZE)
            wanted = x.double() @ exact.T
            error = float((product(x).double() - wanted).abs().max() / wanted.abs().max())
            own, plain = milliseconds(product, x), milliseconds(partial(torch.nn.functional.linear, weight=dense), x)
            print(f"{name:15} {rows:4} {own:5.2f} {plain:9.2f}  {error:.1e}")


if __name__ == "__main__":
    main()
