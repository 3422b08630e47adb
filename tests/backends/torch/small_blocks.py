"""Decoders whose prefill computes few tokens at once, so that a short prompt has several pieces."""

from __future__ import annotations

from dataclasses import replace

from kvc_trt.backends.torch.executor import Decoding
from kvc_trt.backends.torch.model.decoder import TorchDecoder


def in_blocks(tokens: int) -> Decoding:
    """Return the decoding of an executor whose prefill computes `tokens` tokens at once."""

    def made(config, parameters, weights, options):
        return TorchDecoder(config, parameters, weights, replace(options, block=tokens))

    return Decoding(made)
