"""A model of any size without memory: tensors on the meta device have shapes and types, and take the GPU's branches."""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvc_trt import policies
from kvc_trt.backends.torch.decoder_options import DecoderOptions
from kvc_trt.backends.torch.model.decoder import TorchDecoder
from kvc_trt.backends.torch.model.weights import TorchWeights, joined_names
from kvc_trt.graph.state import state_tensors
from kvc_trt.models.presets import load_preset
from kvc_trt.models.weights import expected_tensors

META = torch.device("meta")
LAYERS = 3
LLAMA = replace(load_preset("llama3.1-8b").config, num_hidden_layers=LAYERS)


def weights(model, dtype=torch.bfloat16):
    shapes = expected_tensors(model)

    def joined(parts):
        rows = sum(shapes[part][0] for part in parts)
        return torch.empty((rows, *shapes[parts[0]][1:]), dtype=dtype, device=META)

    layers = [
        {name: joined([f"model.layers.{index}.{part}" for part in parts]) for name, parts in joined_names(model, index)}
        for index in range(model.num_hidden_layers)
    ]
    embedding = joined(["model.embed_tokens.weight"])
    head = embedding if model.tie_word_embeddings else joined(["lm_head.weight"])
    return TorchWeights(layers, embedding, head, joined(["model.norm.weight"]))


def resolved(policy, context, model=LLAMA, budget=512, **changes):
    lengths = {"max_input_len": context - 128, "max_output_len": 128}
    return policies.resolve(policy, model=model, token_budget=budget, **lengths, **changes)


def decoder(policy, context, model=LLAMA, *, kv_cache="auto", **options):
    parameters = resolved(policy, context, model, kv_cache=kv_cache)
    return TorchDecoder(model, parameters, weights(model), DecoderOptions(torch.bfloat16, **options))


def state(parameters, rows, model=LLAMA):
    return {
        tensor.name: torch.empty((rows, *tensor.shape), dtype=getattr(torch, tensor.dtype), device=META)
        for tensor in state_tensors(model, parameters, "bfloat16")
    }


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operators made inside the block and that still live, and the most there ever were."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._known = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        given = {
            tensor.untyped_storage()._cdata
            for tensor in tree_leaves((arguments, named))
            if isinstance(tensor, torch.Tensor)
        }
        result = function(*arguments, **(named or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage):
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, size)

    def _gone(self, size):
        self.now -= size


class AskingTheDevice(TorchDispatchMode):
    """Refuses every operator whose answer the host would have to wait for."""

    WAITING = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "unique", "equal")

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        name = function.__name__.partition(".")[0]
        masks = name in ("index", "index_put", "index_put_") and any(
            isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(arguments[1])
        )
        if name.startswith(self.WAITING) or masks:
            raise AssertionError(f"{function} waits for the device")
        return function(*arguments, **(named or {}))
