"""Muon for the matrices inside the layers, AdamW for everything else.

Muon [1] replaces the momentum of a matrix by the nearest semi-orthogonal one, so that all directions learn at one
rate, the rare ones too.

[1] K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
    https://kellerjordan.github.io/posts/muon/
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

MATRIX_LR = 0.01
OTHER_LR = 1e-3
WARM_UP_STEPS = 50
CONSTANT_SHARE = 0.5  # of all steps; then linear
FINAL_LR_SHARE = 0.02
CLIP_NORM = 1.0
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # the coefficients of [1]
NEWTON_SCHULZ_STEPS = 5


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised. In fp32 throughout: bfloat16 products are far slower on most CPUs."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix from its gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                state = self.state[matrix]
                if not state:
                    state["average"] = torch.zeros_like(matrix)
                average = state["average"].lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonalise(matrix.grad.lerp(average, group["momentum"]))
                # A tall matrix gets a longer step, so that the change of its output does not depend on its shape.
                scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * scale)


def orthogonalise(matrix: Tensor) -> Tensor:
    """U V' of the singular value decomposition U S V' of `matrix` [rows, columns], roughly: 1 becomes 0.7 to 1.2 [1].

    A quintic Newton-Schulz iteration; it multiplies the smaller of the two Gram matrices.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Updates:
    """Both optimisers of a model over a run of `steps`.

    Embedding, head and norms go to AdamW: their rows belong to single tokens, which orthogonalising would mix.
    """

    def __init__(self, model: nn.Module, steps: int) -> None:
        self._model = model
        named = list(model.named_parameters())
        matrices = [weight for name, weight in named if ".layers." in name and weight.ndim == 2]
        others = [weight for name, weight in named if not (".layers." in name and weight.ndim == 2)]
        self._optimisers = (
            Muon(matrices, lr=MATRIX_LR),
            torch.optim.AdamW(others, lr=OTHER_LR, betas=(0.9, 0.98), weight_decay=0.0),
        )
        self._schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: learning_rate_share(step, steps))
            for optimiser in self._optimisers
        ]

    def apply(self, loss: Tensor) -> None:
        """One step against `loss`."""
        self._model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP_NORM)
        for optimiser, schedule in zip(self._optimisers, self._schedules, strict=True):
            optimiser.step()
            schedule.step()


def learning_rate_share(step: int, steps: int) -> float:
    """Warm-up, constant, then linear down to FINAL_LR_SHARE at the last step."""
    warm_up = (step + 1) / WARM_UP_STEPS
    done = max(0.0, (step + 1) / steps - CONSTANT_SHARE) / (1 - CONSTANT_SHARE)
    return min(warm_up, 1 - (1 - FINAL_LR_SHARE) * done)


def make_deterministic(seed: int) -> None:
    """One thread, deterministic operators and a random seed, for the whole process."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
