"""The Python plugins' methods as TensorRT calls them, with its descriptions of tensors; steps run on host memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import product
from types import MappingProxyType

import pytest
import torch

from kvc_trt.backends.tensorrt.python_plugins import Refusal, last_refusal
from kvc_trt.backends.tensorrt.python_plugins.plugin import IMPOSSIBLE_WORKSPACE
from kvc_trt.backends.tensorrt.python_plugins.registration import make_creator
from kvc_trt.kernels.c_library import KernelLibraryError
from kvc_trt.operators.dimensions import groups_of, stored_pages
from kvc_trt.operators.turns.append_block import APPEND_BLOCK, RAISE_BOUNDS
from kvc_trt.operators.turns.join_block import JOIN_BLOCK
from kvc_trt.operators.turns.replace import REPLACE_BOUNDS, REPLACE_CACHE
from tests.backends.tensorrt import rtx
from tests.backends.tensorrt.plugin_cases import (
    BY_NAME,
    KINDS,
    STEPS,
    Step,
    Workspace,
    check_same,
    dense_step,
    fields_with_defaults,
    good_fields,
)
from tests.backends.tensorrt.python_plugins_program import collection
from tests.plugins_cuda import cases

pytestmark = pytest.mark.tensorrt

OPEN = -1
NONE: Mapping[str, int] = MappingProxyType({})
SIZES = {"B": 3, "H": 4, "G": 2, "D": 64, "W": 8, "S": 100, "M": 9}


@pytest.fixture
def trt():
    return rtx.load_or_skip()


@pytest.fixture
def python_plugin(trt, emulation):
    """python_plugin(operator, fields=None, numbers={}) -> plugin over the emulated kernels."""

    def make(operator, fields=None, *, numbers=NONE):
        fields = good_fields(operator.name, numbers) if fields is None else fields
        creator = make_creator(trt, BY_NAME[operator.name], lambda: emulation)
        return creator.create_plugin("layer", collection(trt, fields), trt.TensorRTPhase.BUILD)

    return make


def type_of(trt, dtype: torch.dtype):
    names = {torch.float32: "FLOAT", torch.float16: "HALF", torch.bfloat16: "BF16", torch.int32: "INT32",
             torch.int64: "INT64", torch.int8: "INT8"}  # fmt: skip
    return getattr(trt.DataType, names[dtype])


def describe(trt, shape, kind):
    desc = trt.PluginTensorDesc()
    desc.dims, desc.type, desc.format = tuple(shape), kind, trt.TensorFormat.LINEAR
    return desc


def profile(trt, low, high, kind):
    """Return a dynamic description; the optimum is not known yet when TensorRT asks."""
    open_dims = tuple(a if a == b else OPEN for a, b in zip(low, high, strict=True))
    desc = trt.DynamicPluginTensorDesc()
    desc.desc = describe(trt, open_dims, kind)
    desc.min, desc.opt, desc.max = tuple(low), open_dims, tuple(high)
    return desc


def sizes_of(operator, *, numbers=NONE, **changes) -> dict[str, int]:
    """Sizes that fit the operator's fields, in 16 bit."""
    fields = good_fields(operator.name, numbers)
    capacity = fields.get("capacity", 300)
    pages = stored_pages(capacity, fields.get("page_size", 1), 2, fields.get("fp8_bounds", 0))
    selected = max(fields.get(name, 0) for name in ("top_k", "token_budget", "dense_until"))
    derived = {"C": capacity, "P": pages, "2D": 2 * SIZES["D"], "C+M": capacity + SIZES["M"], "K": selected}
    head_size = changes.get("D", SIZES["D"])
    parts = {"D/2": head_size // 2, "groups": groups_of(head_size), "1": 1}
    return {**SIZES, **derived, **parts, **changes}


def descriptions(trt, operator, make, cache_type=None, *, numbers):
    """(inputs, outputs), each by make(tensor, type)."""
    names = {"FLOAT16": "HALF"}
    fields = good_fields(operator.name, numbers)

    def kind(tensor):
        element = operator.element_of(tensor, fields)
        own = cache_type or trt.DataType.HALF
        return own if element == "CACHE" else getattr(trt.DataType, names.get(element, element))

    return [[make(tensor, kind(tensor)) for tensor in part] for part in (operator.inputs, operator.outputs)]


def tells_the_cache(operator, numbers) -> bool:
    """Codes and bounds in fp8 do not tell the type of the cache."""
    return operator.element_of(operator.inputs[0], good_fields(operator.name, numbers)) == "CACHE"


def fixed(trt, operator, cache_type=None, *, numbers=NONE, **changes):
    sizes = sizes_of(operator, numbers=numbers, **changes)
    return descriptions(
        trt, operator, lambda t, kind: describe(trt, [sizes[s] for s in t.shape], kind), cache_type, numbers=numbers
    )


def ranged(trt, operator, batch, prompt, *, numbers=NONE, **changes):
    low, high = (sizes_of(operator, numbers=numbers, B=b, S=s, **changes) for b, s in zip(batch, prompt, strict=True))
    return descriptions(
        trt,
        operator,
        lambda t, kind: profile(trt, [low[s] for s in t.shape], [high[s] for s in t.shape], kind),
        numbers=numbers,
    )


WITHOUT_SCRATCH = (APPEND_BLOCK, RAISE_BOUNDS, JOIN_BLOCK, REPLACE_CACHE, REPLACE_BOUNDS)
every_operator = pytest.mark.parametrize(
    ("operator", "numbers"), KINDS, ids=["-".join([one.name, *map(str, numbers.values())]) for one, numbers in KINDS]
)


# --- enqueue on host memory ---


def enqueue(trt, plugin, step: Step) -> None:
    """Runs a plugin as TensorRT does: workspace of the profile, a plugin deserialised from its fields, a context."""
    tensors = [(step.operator.inputs, step.inputs), (step.operator.outputs, step.outputs)]
    kinds = [[type_of(trt, value.dtype) for value in values] for _, values in tensors]
    ranges = [
        [profile(trt, (1, *value.shape[1:]), value.shape, kind) for value, kind in zip(values, part, strict=True)]
        for (_, values), part in zip(tensors, kinds, strict=True)
    ]
    plugin.configure_plugin(*ranges)
    workspace = Workspace(plugin.get_workspace_size(*ranges))
    described = [
        [describe(trt, value.shape, kind) for value, kind in zip(values, part, strict=True)]
        for (_, values), part in zip(tensors, kinds, strict=True)
    ]
    pointers = [[value.data_ptr() for value in values] for _, values in tensors]
    creator = make_creator(trt, BY_NAME[step.operator.name], plugin._kernels)
    loaded = creator.create_plugin("layer", plugin.get_fields_to_serialize(), trt.TensorRTPhase.RUNTIME)
    attached = loaded.attach_to_context(None)
    attached.set_tactic(0)
    attached.on_shape_change(*described)
    attached.enqueue(*described, *pointers, workspace.address, 0)
    workspace.check()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(("make", "lengths"), STEPS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_step_writes_the_bits_of_the_operator(trt, python_plugin, emulation, make, lengths, dtype):
    step = make(emulation, dtype, lengths)
    enqueue(trt, python_plugin(step.operator, step.fields), step)
    check_same(step)


def test_a_copied_cache_is_refused_and_left_alone(trt, python_plugin, emulation):
    step = dense_step(emulation, torch.float32, (9,))
    step.outputs[1:] = [value.clone() for value in step.outputs[1:]]
    before = [value.clone() for value in (*step.inputs, *step.outputs)]
    with pytest.raises(Refusal, match=r"k_cache_out: expected the buffer of k_cache \(.*kALIASED_PLUGIN_IO_10_03"):
        enqueue(trt, python_plugin(step.operator, step.fields), step)
    for value, old in zip((*step.inputs, *step.outputs), before, strict=True):
        assert torch.equal(value.view(torch.uint8), old.view(torch.uint8))


@every_operator
def test_a_step_without_its_buffers_is_refused(trt, python_plugin, operator, numbers):
    inputs, outputs = fixed(trt, operator, numbers=numbers)
    with pytest.raises(Refusal, match="null") as caught:
        python_plugin(operator, numbers=numbers).enqueue(inputs, outputs, [0] * len(inputs), [0] * len(outputs), 0, 0)
    assert last_refusal() == str(caught.value)
    assert last_refusal().startswith(f"kvc plugin: {operator.name}: ")


@every_operator
def test_shapes_and_types_of_a_step_are_checked(trt, python_plugin, operator, numbers):
    plugin = python_plugin(operator, numbers=numbers)
    plugin.on_shape_change(*fixed(trt, operator, numbers=numbers))
    for part, specs in enumerate((operator.inputs, operator.outputs)):
        for index in range(len(specs)):
            for wrong in _wrong_descriptions(
                trt, operator, specs[index], fixed(trt, operator, numbers=numbers)[part][index]
            ):
                described = fixed(trt, operator, numbers=numbers)
                described[part][index] = wrong
                with pytest.raises(Refusal, match=f"kvc plugin: {operator.name}: "):
                    plugin.on_shape_change(*described)


def _wrong_descriptions(trt, operator, tensor, right):
    dims = tuple(right.dims)
    uses = Counter(symbol for one in operator.tensors for symbol in one.shape)
    for axis, size in product(range(len(dims)), (OPEN, 1029, 2**31, 2**40, -(2**63), 2**63 - 1)):
        if size == 1029 and tensor.shape[axis] == "M" and uses["M"] == 1:
            continue  # a turn may be so long, and no other tensor contradicts it
        yield describe(trt, (*dims[:axis], size, *dims[axis + 1 :]), right.type)
    yield describe(trt, dims[:-1], right.type)
    yield describe(trt, (*dims, 1), right.type)
    yield describe(trt, dims, trt.DataType.INT32 if right.type == trt.DataType.INT8 else trt.DataType.INT8)
    other = describe(trt, dims, right.type)
    other.format = trt.TensorFormat.CHW32
    yield other


@every_operator
def test_numbers_of_tensors_are_checked(trt, python_plugin, operator, numbers):
    plugin, (inputs, outputs) = python_plugin(operator, numbers=numbers), fixed(trt, operator, numbers=numbers)
    expected = f"expected {len(inputs)} inputs and {len(outputs)} outputs, found"
    with pytest.raises(Refusal, match=f"{expected} {len(inputs) - 1} and {len(outputs)}"):
        plugin.on_shape_change(inputs[1:], outputs)
    with pytest.raises(Refusal, match=f"{expected} {len(inputs)} and {len(outputs) + 1}"):
        plugin.enqueue(inputs, [*outputs, outputs[0]], [], [], 0, 0)
    with pytest.raises(Refusal, match=f"{expected} 0 and {len(outputs)}"):
        plugin.get_output_data_types([])


# --- before that ---


@every_operator
def test_profiles_are_configured_and_their_largest_workspace_is_declared(trt, python_plugin, operator, numbers):
    plugin = python_plugin(operator, numbers=numbers)
    largest = ranged(trt, operator, (1, 32), (1, 4096), numbers=numbers)
    plugin.configure_plugin(*largest)
    declared = plugin.get_workspace_size(*largest)
    assert declared < 2**40
    assert (declared == 0) == (BY_NAME[operator.name] in WITHOUT_SCRATCH)
    assert declared == plugin.get_workspace_size(*ranged(trt, operator, (32, 32), (4096, 4096), numbers=numbers))
    for batch, prompt in product((1, 31, 32), (1, 49, 108, 109, 4095)):
        assert plugin.get_workspace_size(*ranged(trt, operator, (1, batch), (1, prompt), numbers=numbers)) <= declared


@every_operator
def test_a_profile_that_the_kernels_do_not_serve_is_refused(trt, python_plugin, operator, numbers, capfd):
    plugin = python_plugin(operator, numbers=numbers)
    heads = any("H" in tensor.shape for tensor in operator.tensors)
    for changes in (*([{"H": 3}] if heads else []), {"D": 20, "2D": 40}):
        wrong = ranged(trt, operator, (1, 4), (64, 128), numbers=numbers, **changes)
        with pytest.raises(Refusal, match=r"heads is 3|head_size is 20|channels is 40"):
            plugin.configure_plugin(*wrong)
        assert plugin.get_workspace_size(*wrong) == IMPOSSIBLE_WORKSPACE
        assert last_refusal() in capfd.readouterr().err
    with pytest.raises(Refusal, match="batch"):
        plugin.configure_plugin(*ranged(trt, operator, (0, 4), (64, 128), numbers=numbers))


@every_operator
def test_types_of_outputs_follow_the_cache(trt, python_plugin, operator, numbers):
    plugin = python_plugin(operator, numbers=numbers)
    for cache_type in (trt.DataType.FLOAT, trt.DataType.HALF, trt.DataType.BF16):
        inputs, outputs = ([desc.type for desc in part] for part in fixed(trt, operator, cache_type, numbers=numbers))
        assert plugin.get_output_data_types(inputs) == outputs
        for index, name in enumerate(tensor.name for tensor in operator.inputs[1:]):
            wrong = [*inputs]
            wrong[index + 1] = trt.DataType.FP8
            with pytest.raises(Refusal, match=f"{name}: expected DataType {int(inputs[index + 1])}, found 6"):
                plugin.get_output_data_types(wrong)
    if not tells_the_cache(operator, numbers):
        return
    with pytest.raises(Refusal, match=r"type of the cache: expected float32, .* found DataType 2"):
        plugin.get_output_data_types([trt.DataType.INT8, *inputs[1:]])


@pytest.mark.slow
@pytest.mark.one_in(3)
@every_operator
def test_one_format_and_three_types_are_served(trt, python_plugin, operator, numbers):
    plugin = python_plugin(operator, numbers=numbers)
    firsts = ("FLOAT", "HALF", "BF16") if tells_the_cache(operator, numbers) else ("INT8",)
    served = 0
    for cache_type in trt.DataType.__members__.values():
        inputs, outputs = fixed(trt, operator, cache_type, numbers=numbers)
        tensors = [_dynamic(trt, desc) for desc in (*inputs, *outputs)]
        for position, kind in product(range(len(tensors)), trt.DataType.__members__.values()):
            right = tensors[position].desc.type
            for layout in trt.TensorFormat.__members__.values():
                tensors[position].desc.type, tensors[position].desc.format = kind, layout
                found = plugin.supports_format_combination(position, tensors, len(inputs))
                first = tensors[0].desc.type.name in firsts
                same = position == 0 or kind == right
                assert found == (first and same and layout == trt.TensorFormat.LINEAR)
                served += found
            tensors[position].desc.type, tensors[position].desc.format = right, trt.TensorFormat.LINEAR
        for position in (-1, len(tensors)):
            assert not plugin.supports_format_combination(position, tensors, len(inputs))
        assert not plugin.supports_format_combination(0, tensors, len(inputs) - 1)
        assert not plugin.supports_format_combination(0, tensors[1:], len(inputs))
    assert served > 0


def _dynamic(trt, desc):
    whole = trt.DynamicPluginTensorDesc()
    whole.desc = desc
    return whole


@every_operator
def test_aliases_are_those_of_the_schema(python_plugin, operator, numbers):
    plugin = python_plugin(operator, numbers=numbers)
    names = [tensor.name for tensor in operator.inputs]
    aliases = [-1 if tensor.alias is None else names.index(tensor.alias) for tensor in operator.outputs]
    assert [plugin.get_aliased_input(output) for output in range(plugin.num_outputs)] == aliases
    assert [plugin.get_aliased_input(output) for output in (-1, plugin.num_outputs, 2**31 - 1)] == [-1, -1, -1]


@every_operator
def test_a_clone_is_another_plugin_of_the_same_fields(python_plugin, operator, numbers):
    plugin = python_plugin(operator, numbers=numbers)
    clone = plugin.clone()
    assert clone is not plugin
    expected = fields_with_defaults(operator.name, good_fields(operator.name, numbers))
    for one in (plugin, clone, plugin.attach_to_context(None)):
        fields = {field.name: field.data.tolist() for field in one.get_fields_to_serialize()}
        assert fields == {name: [value] for name, value in expected.items()}
        assert (one.plugin_name, one.num_outputs) == (operator.name, len(operator.outputs))


def test_without_kernels_the_reason_says_which_are_wanted(trt, emulation, monkeypatch):
    """The emulation would follow the GPU's addresses into nowhere."""
    from kvc_trt.backends.tensorrt.python_plugins.registration import _cuda_kernels
    from kvc_trt.kernels import loading

    monkeypatch.setattr(loading, "PACKAGED", emulation.path.with_name("none.so"))
    monkeypatch.delenv(loading.VARIABLE, raising=False)
    with pytest.raises(KernelLibraryError, match=f"no kernel library: expected {loading.VARIABLE}"):
        _cuda_kernels()
    monkeypatch.setenv(loading.VARIABLE, str(emulation.path))
    with pytest.raises(KernelLibraryError, match="is the emulation one, expected the one for cuda"):
        _cuda_kernels()
    dense = BY_NAME["KvcDenseAttention"]
    fields = collection(trt, good_fields(dense.name))
    plugin = make_creator(trt, dense, _cuda_kernels).create_plugin("layer", fields, trt.TensorRTPhase.BUILD)
    with pytest.raises(Refusal, match="is the emulation one"):
        plugin.configure_plugin(*ranged(trt, dense, (1, 4), (1, 1)))
