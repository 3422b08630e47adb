"""The parts of a decoder that are not attention, as `transformers` defines them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvc_trt.models.config import FeedForward, ModelConfig
from kvc_trt.models.rope import rotary_tables
from kvc_trt.models.weights import WeightSource, expected_tensors, row_chunks

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Weights = Mapping[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square normalisation of the last axis (Zhang and Sennrich, arXiv 1910.07467)."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + epsilon))


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Multiply x [N,in] by the [out,in] matrix of that name and add its bias if the model has one."""
    return torch.nn.functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """LayerNorm of the last axis (Ba et al., arXiv 1607.06450); some models have no bias."""
    centred = x - x.mean(dim=-1, keepdim=True)
    normed = rms_norm(centred, weight, epsilon)
    return normed if bias is None else normed + bias


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu-tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu": torch.nn.functional.relu,
}


def mlp(product: Callable[[str, Tensor], Tensor], x: Tensor, part: FeedForward) -> Tensor:
    """The feed-forward block, gated (SwiGLU, arXiv 2002.05202) or plain: [N,hidden] -> [N,hidden].

    `product` multiplies by the matrix of a name, as `linear` does.
    """
    activated, up = ACTIVATIONS[part.activation], product("mlp.up_proj", x)
    inner = activated(product("mlp.gate_proj", x)) * up if part.gated else activated(up)
    return product("mlp.down_proj", inner)


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the last axis of `x`, whose two halves form the pairs, by angles that broadcast to [...,D/2]."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)


class Rotary:
    """Rotary position embedding (arXiv 2104.09864); the two halves of a head form the pairs."""

    def __init__(
        self, config: ModelConfig, length: int, dtype: torch.dtype, *, longest: int, own_base: float | None = None
    ) -> None:
        """Cover `length` positions, for sequences of up to `longest` tokens; `own_base` is that of some layers."""
        tables = rotary_tables(config, length, longest=longest, own_base=own_base)
        self.cos, self.sin = (torch.from_numpy(table).to(dtype) for table in tables)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [N,heads,D] to its logical positions [N]."""
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        return rotated(x, cos, sin)


class DecoderWeights:
    """Tensors of a source in the type of computation, read layer by layer and kept only if `resident`."""

    def __init__(self, config: ModelConfig, source: WeightSource, dtype: torch.dtype, *, resident: bool) -> None:
        self._source, self._dtype, self._resident = source, dtype, resident
        self._names = list(expected_tensors(config))
        self._head = EMBEDDING if config.tie_word_embeddings else HEAD
        self._kept: dict[str, Tensor] = {}

    def layer(self, index: int) -> Weights:
        """Return all tensors of one layer, by their name within the layer."""
        prefix = f"model.layers.{index}."
        return {name[len(prefix) :]: self.tensor(name) for name in self._names if name.startswith(prefix)}

    def outer(self, prefix: str) -> Weights:
        """Return the tensors of a part that is in no layer, by their names."""
        return {name: self.tensor(name) for name in self._names if name.startswith(f"{prefix}.")}

    def tensor(self, name: str) -> Tensor:
        """Read one whole tensor."""
        if name in self._kept:
            return self._kept[name]
        read = self._convert(self._source.read(name))
        if self._resident:
            self._kept[name] = read
        return read

    def embed(self, tokens: Tensor) -> Tensor:
        """Gather embedding rows: tokens [N] -> [N,hidden]."""
        if self._resident:
            return self.tensor(EMBEDDING)[tokens]
        ids, places = torch.unique(tokens, return_inverse=True)
        rows = [self._convert(self._source.read_rows(EMBEDDING, i, i + 1)) for i in ids.tolist()]
        return torch.cat(rows)[places]

    def logits(self, x: Tensor) -> Tensor:
        """Project to the vocabulary: [N,hidden] -> [N,vocab]."""
        if self._resident:
            return x @ self.tensor(self._head).T
        chunks = row_chunks(self._source.shape(self._head))
        return torch.cat([x @ self._convert(self._source.read_rows(self._head, *rows)).T for rows in chunks], dim=1)

    def _convert(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        widened = np.asarray(array, dtype=np.float64 if self._dtype == torch.float64 else np.float32)
        return torch.from_numpy(widened).to(self._dtype)
