"""The tables of the twins against the operators' schemas, and their calls of the C ABI. Needs no TensorRT."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase

import pytest
import torch

from kvc_trt.backends.tensorrt.lowering import OPERATORS as PLUGINS
from kvc_trt.backends.tensorrt.twins import OPERATORS
from kvc_trt.backends.tensorrt.twins.calls import SCALARS, Call, addresses
from kvc_trt.backends.tensorrt.twins.plugin import IMPOSSIBLE_WORKSPACE
from kvc_trt.backends.tensorrt.twins.sizes import NAMES, Sizes
from kvc_trt.backends.tensorrt.twins.tables import CACHE, INT32, INT64, NAMESPACE, VERSION
from kvc_trt.kernels.c_library import KernelError
from kvc_trt.kernels.library import DTYPES
from kvc_trt.operators import KVC_DOMAIN, schema
from kvc_trt.operators.dimensions import SIZES
from kvc_trt.operators.registry import KERNEL_OPERATORS
from tests.backends.tensorrt.twin_cases import BY_NAME, STEPS, Workspace, check_same, graph_fields, malformed
from tests.plugins_cuda import cases
from tests.plugins_cuda.tensorrt.toolchain import SOURCES

SCHEMAS = {operator.name: operator for operator in KERNEL_OPERATORS}
ELEMENTS = {schema.CACHE: CACHE, schema.INT64: INT64, schema.INT32: INT32}


# --- tables ---


def test_there_is_a_twin_of_every_plugin():
    assert set(BY_NAME) == set(SCHEMAS) == PLUGINS


@pytest.mark.parametrize("name", SCHEMAS)
def test_fields_are_those_of_the_schema(name):
    twin = [(field.name, field.minimum, field.maximum) for field in BY_NAME[name].fields]
    assert twin == [(attribute.name, attribute.least, attribute.most) for attribute in SCHEMAS[name].attributes]


@pytest.mark.parametrize("name", SCHEMAS)
def test_tensors_types_shapes_and_aliases_are_those_of_the_schema(name):
    twin, names = BY_NAME[name], [tensor.name for tensor in SCHEMAS[name].inputs]
    expected = [
        (tensor.name, ELEMENTS[tensor.element], tensor.shape, names.index(tensor.alias) if tensor.alias else None)
        for tensor in SCHEMAS[name].tensors
    ]
    assert [(one.name, one.element, one.shape, one.alias) for one in (*twin.inputs, *twin.outputs)] == expected


def test_namespace_version_and_names_of_sizes_are_those_of_the_schemas():
    assert (NAMESPACE, VERSION) == (KVC_DOMAIN, schema.VERSION)
    assert {symbol: size.words for symbol, size in SIZES.items()} == NAMES
    shift = IMPOSSIBLE_WORKSPACE.bit_length() - 1
    assert f"kImpossibleWorkspace = size_t{{1}} << {shift};" in (SOURCES / "plugin.cpp").read_text()


def formats(source: str) -> Iterator[str]:
    """The text of every refuse(...) as a pattern in which * is a value."""
    for call in source.split('refuse("')[1:]:
        pieces = call.split('"')  # literals, and what is between them
        whole = pieces[0]
        for between, literal in zip(pieces[1::2], pieces[2::2], strict=False):
            if between.replace("PRId32", "").strip():
                break
            whole += ("d" if "PRId32" in between else "") + literal
        text, *values = whole.split("%")
        for value in values:
            text += "*" + value.lstrip("0123456789.z")[1:]
        yield text


def test_reasons_have_the_words_of_the_plugins():
    """As far as text can tell; where TensorRT's headers are found, whole lines are compared."""
    patterns = list(formats((SOURCES / "fields.cpp").read_text()))
    assert len(patterns) > 8
    assert len(malformed()) > 100
    for case in malformed():
        assert [pattern for pattern in patterns if fnmatchcase(case.reason, pattern)], case.reason


# --- calls of the C ABI ---


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_every_number_and_address_of_the_struct_is_set(operator):
    """And from one source each."""
    sizes = Sizes()
    for symbol in NAMES:
        sizes.fix(symbol, 1, "test")
    tensors = [*operator.inputs, *operator.outputs]
    pointers = addresses(operator, *([1] * len(part) for part in (operator.inputs, operator.outputs)))
    sources = [{field.name for field in operator.fields}, set(operator.extra(sizes)), set(pointers)]
    used = {symbol for tensor in tensors for symbol in tensor.shape}
    sources.append({name for name, symbol in SCALARS.items() if symbol in used} - sources[0])
    assert sum(map(len, sources)) == len(set().union(*sources))
    members = {name for name, *_ in operator.parameters._fields_} - {"struct_bytes", "dtype", "reserved"}
    assert members <= set().union(*sources)
    unused = set().union(*sources) - members
    assert unused == ({"dense_until"} if operator.name == "KvcDenseAttention" else set())


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(("make", "lengths"), STEPS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_call_writes_the_bits_of_the_operator(emulation, make, lengths, dtype):
    step = make(emulation, dtype, lengths)
    sizes = Sizes()
    for tensor, value in zip(step.operator.inputs, step.inputs, strict=True):
        sizes.bind(tensor.name, tensor.shape, value.shape)
    step.operator.derive(step.fields, sizes)
    call = Call(step.operator, step.fields, sizes, DTYPES[dtype])
    workspace = Workspace(call.workspace_bytes(emulation))
    pointers = ([value.data_ptr() for value in values] for values in (step.inputs, step.outputs))
    call.launch(emulation, *pointers, workspace.address, 0)
    check_same(step)
    workspace.check()


def test_what_the_kernels_refuse_is_refused(emulation):
    step = STEPS[0][0](emulation, torch.float32, (9,))
    sizes = Sizes()
    for symbol, size in {"B": 1, "H": 3, "G": 2, "D": 32, "W": 8, "S": 64}.items():
        sizes.fix(symbol, size, "test")
    step.operator.derive(step.fields, sizes)
    with pytest.raises(KernelError, match="heads is 3"):
        Call(step.operator, step.fields, sizes, DTYPES[torch.float32]).workspace_bytes(emulation)


# --- what the graphs carry ---


def test_graphs_carry_these_fields_within_their_ranges():
    found = graph_fields()
    assert {name for name, _ in found} == set(BY_NAME)
    for name, values in found:
        operator = BY_NAME[name]
        assert [field.name for field in operator.fields] == [attribute for attribute, _ in values]
        for field, (_, value) in zip(operator.fields, values, strict=True):
            assert field.minimum <= value <= field.maximum
        operator.check(dict(values))


def test_nothing_of_tensorrt_is_imported():
    """Not even where it is installed: the caller hands a module in."""
    program = (
        "import sys, kvc_trt.backends.tensorrt.twins;"
        "print([name for name in sys.modules if name.split('.')[0].startswith('tensorrt')], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "False"]
