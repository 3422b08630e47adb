"""Check whether a build can be divided among ranks (`--tp`), before it does any work, and for `plan`."""

from __future__ import annotations

from kvc_trt.engine.missing import missing_kernel_of_choices
from kvc_trt.errors import InputError
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.sharding import shards


def rank_model(model: ModelConfig, ranks: int | None) -> ModelConfig:
    """Return the part of the model that one rank computes; the model itself if it is not divided (None)."""
    return model if ranks is None else shards(model, ranks)[0].local


def check_parallel(ranks: int, model: ModelConfig, parameters: PolicyParameters) -> None:
    """Raise InputError if model or policy cannot be divided among this many ranks.

    A policy can be if its choices are made for each KV head from the queries of its group alone, in every layer alike:
    those that have kernels. In a sliding layer nothing is chosen.
    """
    shards(model, ranks)
    missing = missing_kernel_of_choices(parameters, model.num_hidden_layers)
    if missing is not None:
        raise InputError(
            f"--tp {ranks}: policy {parameters.policy} is not divided among ranks, as it has no {missing}",
            hint="leave out --tp, or take a policy with kernels, such as full, rocketkv, snapkv++ or hybrid",
        )
