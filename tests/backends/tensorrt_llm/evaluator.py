"""The adapter's calls, evaluated one by one in numpy.

This is neither TensorRT nor TensorRT-LLM: it implements each function as upstream's source documents it, with our
reference operators in place of the plugins. It can show that the networks compute the same as the ONNX graphs, and that
calls keep the rules that can be read in that source (strong typing, equal ranges of equally named dimensions). It does
not show that the library accepts the calls, and says nothing about engines.
"""

from __future__ import annotations

import contextlib
import types
from collections import Counter

import ml_dtypes
import numpy as np
import torch

from kvc_trt.backends.tensorrt_llm.builder_api import BuilderApi
from kvc_trt.kernels import reference_ops

DTYPES = {
    "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int64": np.int64, "int32": np.int32,
    "int8": np.int8,
}  # fmt: skip


class Value:
    """A tensor with its contents."""

    def __init__(self, array, network):
        self.array, self.network = np.asarray(array), network

    @property
    def trt_tensor(self):
        return self

    def _with(self, array):
        return Value(array, self.network)

    def _operand(self, other):
        if isinstance(other, Value):
            assert self.array.dtype == other.array.dtype, "strongly typed networks do not mix types"
            return other.array
        return np.array(other, self.array.dtype)

    def __add__(self, other):
        return self._with(self.array + self._operand(other))

    def __sub__(self, other):
        return self._with(self.array - self._operand(other))

    def __mul__(self, other):
        return self._with(self.array * self._operand(other))

    def view(self, shape):
        sizes = shape.array.tolist() if isinstance(shape, Value) else list(shape)
        assert sizes.count(-1) <= 1
        return self._with(self.array.reshape([self.array.shape[i] if n == 0 else n for i, n in enumerate(sizes)]))

    def permute(self, dims):
        return self._with(self.array.transpose(dims))

    def split(self, split_size_or_sections, dim=0):
        total, size = self.array.shape[dim], split_size_or_sections
        assert isinstance(size, int)
        assert total % size == 0
        return [self._with(part) for part in np.split(self.array, total // size, axis=dim)]

    def cast(self, dtype):
        return self._with(self.array.astype(DTYPES[dtype]))

    def mark_output(self, name, dtype):
        assert name not in self.network.outputs
        self.network.outputs[name] = self.array.astype(DTYPES[dtype])


class Functions:
    """The part of tensorrt_llm.functional that the protocol covers."""

    def __init__(self, network):
        self._network = network

    def _value(self, array):
        return Value(array, self._network)

    def constant(self, ndarray, as_dtype=None):
        assert as_dtype is None or DTYPES[as_dtype] == ndarray.dtype
        assert as_dtype is not None or ndarray.dtype in (np.float32, np.int64), "numpy's own types only"
        return self._value(ndarray)

    def embedding(self, input, weight):
        return self._value(weight.array[input.array])

    def matmul(self, input, mat2, transa=False, transb=False):
        assert input.array.dtype == mat2.array.dtype
        left, right = (
            one.array.T if flipped else one.array for one, flipped in ((input, transa), (mat2, transb))
        )  # fmt: skip
        return self._value((left.astype(np.float32) @ right.astype(np.float32)).astype(input.array.dtype))

    def rms_norm(self, input, normalized_shape, *, weight, eps):
        assert input.array.shape[-1] == normalized_shape
        wide = input.array.astype(np.float32)
        normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + np.float32(eps))
        return self._value(normed.astype(input.array.dtype)) * weight

    def silu(self, input):
        return self._value(input.array / (1 + np.exp(-input.array)))

    def concat(self, inputs, dim=0):
        arrays = [np.atleast_1d(one.array if isinstance(one, Value) else np.int64(one)) for one in inputs]
        assert len({array.dtype for array in arrays}) == 1
        return self._value(np.concatenate(arrays, axis=dim))

    def shape(self, input, dim=None):
        sizes = np.array(input.array.shape, np.int64)
        return self._value(sizes if dim is None else sizes[dim])

    def arange(self, start, end, dtype):
        assert start.array.ndim == end.array.ndim == 0
        return self._value(np.arange(start.array, end.array, dtype=DTYPES[dtype]))

    def expand(self, input, expand_shape):
        assert input.array.ndim == len(expand_shape.array)
        return self._value(np.broadcast_to(input.array, expand_shape.array))

    def maximum(self, left, right):
        return self._value(np.maximum(left.array, left._operand(right)))

    def minimum(self, left, right):
        return self._value(np.minimum(left.array, left._operand(right)))

    def gather_nd(self, input, indices, batch_dims=1):
        assert batch_dims == 1
        assert indices.array.shape[-1] == 1
        return self._value(np.stack([row[at[..., 0]] for row, at in zip(input.array, indices.array, strict=True)]))

    def select(self, input, dim, index):
        return self._value(np.take(input.array, index, axis=dim))


class Network:
    """One network: its inputs' contents are given, its outputs computed while it is defined."""

    def __init__(self, feeds):
        self.feeds = feeds
        self.forget()

    def forget(self):
        """Be an empty network again."""
        self.outputs, self.inputs, self.plugins, self.decomposable = {}, [], Counter(), []
        self._ranges, self._sizes = {}, {}

    def make_tensor(
        self, name=None, dtype=None, shape=None, dim_range=None, is_network_input=True, *, network=None, trt_tensor=None
    ):
        if not is_network_input:
            assert network is self
            return trt_tensor
        array = self.feeds[name]
        assert array.dtype == DTYPES[dtype]
        assert len(array.shape) == len(shape) == len(dim_range), name
        for size, given, (axis, ranges) in zip(array.shape, shape, dim_range.items(), strict=True):
            # Upstream compares the ranges of equally named dimensions; TensorRT their sizes.
            assert self._ranges.setdefault(axis, ranges) == ranges
            assert self._sizes.setdefault(axis, size) == size
            if given != -1:
                assert given == size
                assert set(ranges) == {size}
            else:
                assert any(low <= size <= high for low, _, high in ranges), f"{name}: {size} in no profile"
        self.inputs.append(name)
        return Value(array, self)

    def add_attention(self, query, key, value, operation, causal):
        assert operation == "SOFTMAX"
        tensors = [torch.from_numpy(one.array.astype(np.float32)) for one in (query, key, value)]
        output = torch.nn.functional.scaled_dot_product_attention(
            *tensors, is_causal=causal, scale=1.0, enable_gqa=True
        ).numpy()
        attention = types.SimpleNamespace(decomposable=False)
        attention.get_output = lambda index: Value([output][index].astype(query.array.dtype), self)
        self.decomposable.append(attention)
        return attention

    def add_plugin_v3(self, inputs, shape_inputs, plugin):
        assert shape_inputs == []
        name, attributes = plugin
        self.plugins[name] += 1
        outputs = [Value(array, self) for array in EVALUATED[name]([one.array for one in inputs], attributes)]
        return types.SimpleNamespace(get_output=outputs.__getitem__)


def _compact(arrays, attributes):
    tensors = [torch.from_numpy(np.ascontiguousarray(one)) for one in arrays]
    assert attributes["prompt_budget"] <= attributes["capacity"]
    numbers = {name: value for name, value in attributes.items() if name != "by_length"}
    own = dict(zip(("prompt_budgets", "pool_kernels"), tensors[4:], strict=False))
    assert len(own) == 2 * attributes.get("by_length", 0)
    result = reference_ops.compact(*tensors[:4], reference_ops.CompactNumbers(**numbers), **own)
    names = ("k_cache", "v_cache", "bounds", "cache_lengths", "indices")
    return [getattr(result, name).numpy() for name in names]


def _hybrid(arrays, attributes):
    tensors = [torch.from_numpy(np.array(one)) for one in arrays]
    output, selected = reference_ops.hybrid_attention(*tensors, reference_ops.StepNumbers(**attributes))
    return [one.numpy() for one in (output, *tensors[3:6], selected)]


def _dense(arrays, attributes):
    assert set(attributes) == {"dense_until"}
    tensors = [torch.from_numpy(np.array(one)) for one in arrays]
    output = reference_ops.dense_attention(*tensors)
    return [one.numpy() for one in (output, *tensors[3:5])]


EVALUATED = {"KvcCompact": _compact, "KvcHybridAttention": _hybrid, "KvcDenseAttention": _dense}


class Registry:
    """The plugin registry: creators by name, version and namespace."""

    def __init__(self, names=tuple(EVALUATED)):
        self.names = names

    def get_creator(self, name, version, namespace):
        if (version, namespace) != ("1", "kvc") or name not in self.names:
            return None

        def create_plugin(layer, fields, phase):
            assert phase == "BUILD"
            for field, data, kind in fields:
                assert data.dtype == np.int32, field
                assert data.shape == (1,)
                assert kind == "INT32"
            return layer, {field: int(data[0]) for field, data, _ in fields}

        return types.SimpleNamespace(create_plugin=create_plugin)


class Builder:
    """Hands out the one network; a plan is the list of its outputs' names."""

    def __init__(self, network, previews):
        self._network, self._previews = network, previews

    def create_network(self):
        self._network.forget()
        return self._network

    def create_builder_config(self, precision, *, strongly_typed, profiling_verbosity):
        assert strongly_typed
        assert precision in DTYPES
        config = types.SimpleNamespace(set_preview_feature=lambda feature, on: self._previews.append((feature, on)))
        return types.SimpleNamespace(trt_builder_config=config)

    def build_engine(self, network, builder_config):
        assert network is self._network
        assert network.outputs, "Engine building failed, please check the error log."
        return "\n".join(network.outputs).encode()


def evaluator(feeds, registry=None):
    """Return (the API over one network with these inputs, the network, the registry, the preview features set)."""
    network, registry, previews = Network(feeds), registry or Registry(), []
    current = []

    @contextlib.contextmanager
    def net_guard(guarded):
        current.append(guarded)
        yield
        current.pop()

    def default_net():
        return current[-1]  # raises outside of net_guard, as upstream does

    tensorrt = types.SimpleNamespace(
        __version__="10.14.1",
        **{name: name for name in ("float32", "float16", "bfloat16")},
        get_plugin_registry=lambda: registry,
        PluginField=lambda name, data, kind: (name, data, kind),
        PluginFieldCollection=list,
        PluginFieldType=types.SimpleNamespace(INT32="INT32"),
        TensorRTPhase=types.SimpleNamespace(BUILD="BUILD"),
        AttentionNormalizationOp=types.SimpleNamespace(SOFTMAX="SOFTMAX"),
        PreviewFeature=types.SimpleNamespace(ALIASED_PLUGIN_IO_10_03="ALIASED_PLUGIN_IO_10_03"),
    )
    api = BuilderApi(
        "1.2.1", Functions(network), network.make_tensor, lambda output, layer: output,
        lambda: Builder(network, previews), net_guard, default_net, default_net, tensorrt,
    )  # fmt: skip
    return api, network, registry, previews
