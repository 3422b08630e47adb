"""Messages of the Python plugins, and their calls of the C ABI. Needs no TensorRT."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase

import pytest
import torch

from kvc_trt.backends.tensorrt.python_plugins.calls import Call
from kvc_trt.backends.tensorrt.python_plugins.plugin import IMPOSSIBLE_WORKSPACE
from kvc_trt.kernels.c_library import KernelError
from kvc_trt.kernels.library import DTYPES
from kvc_trt.kernels.parameters import RESERVED, members
from kvc_trt.operators.dimensions import Dimensions
from kvc_trt.operators.registry import KERNEL_OPERATORS
from kvc_trt.operators.schema import CACHE_FORMAT, Tensor
from tests.backends.tensorrt.plugin_cases import BY_NAME, STEPS, Workspace, check_same, graph_fields, malformed
from tests.plugins_cuda import cases
from tests.plugins_cuda.tensorrt.toolchain import SOURCES

# --- the words of the C++ plugins ---


def formats(source: str) -> Iterator[str]:
    """Yield the text of every refuse(...) as a pattern in which * is a value."""
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
    """Compares the fixed texts; where TensorRT's headers are found, another test compares whole lines."""
    patterns = [text for path in SOURCES.rglob("*.cpp") for text in formats(path.read_text())]
    assert len(patterns) > 8
    assert len(malformed()) > 100
    for case in malformed():
        assert [pattern for pattern in patterns if fnmatchcase(case.reason, pattern)], case.reason


def test_the_workspace_that_no_gpu_has_is_that_of_the_plugins():
    shift = IMPOSSIBLE_WORKSPACE.bit_length() - 1
    assert f"kImpossibleWorkspace = size_t{{1}} << {shift};" in (SOURCES / "plugin.cpp").read_text()


# --- calls of the C ABI ---


@pytest.mark.parametrize("operator", KERNEL_OPERATORS, ids=lambda operator: operator.name)
def test_every_number_and_address_of_the_struct_is_set(operator):
    operator = operator.with_lengths()
    sizes = Dimensions(DTYPES[torch.float16].bytes)
    for tensor in operator.inputs:
        sizes.bind(tensor.name, tensor.shape, [{"2D": 32, "C+M": 32}.get(symbol, 16) for symbol in tensor.shape])
    attributes = {one.name: {"page_size": 1, "fp8_bounds": 1}.get(one.name, 16) for one in operator.attributes}
    operator.derive(attributes, sizes)
    passed = []

    class Kernels:
        def workspace_bytes(self, operation, params):
            return 0

        def call(self, operation, params, workspace, workspace_bytes, stream=None):
            passed.append(params)

    inputs, outputs = (range(64, 64 + len(part)) for part in (operator.inputs, operator.outputs))
    Call(operator, attributes, sizes, DTYPES[torch.float16]).launch(Kernels(), inputs, outputs, 0, 0)
    (params,) = passed
    of_formats = {
        one.name for one in members(operator) if isinstance(one.source, Tensor) and "groups" in one.source.shape
    }
    names = {name for name, *_ in params._fields_} - {RESERVED, CACHE_FORMAT.name} - of_formats
    assert [name for name in names if not getattr(params, name)] == []


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(("make", "lengths"), STEPS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_call_writes_the_bits_of_the_operator(emulation, make, lengths, dtype):
    step = make(emulation, dtype, lengths)
    sizes = Dimensions(DTYPES[dtype].bytes)
    for tensor, value in zip(step.operator.inputs, step.inputs, strict=True):
        sizes.bind(tensor.name, tensor.shape, value.shape)
    step.operator.derive(step.fields, sizes)
    call = Call(step.operator, step.fields, sizes, DTYPES[dtype])
    workspace = Workspace(call.workspace_bytes(emulation))
    pointers = ([value.data_ptr() for value in values] for values in (step.inputs, step.outputs))
    call.launch(emulation, *pointers, workspace.address, 0)
    check_same(step)
    workspace.check()


def test_calls_that_the_kernels_refuse_are_refused(emulation):
    step = STEPS[0][0](emulation, torch.float32, (9,))
    sizes = Dimensions(DTYPES[torch.float32].bytes)
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
        operator = BY_NAME[name].for_numbers(dict(values))
        assert [field.name for field in operator.attributes] == [attribute for attribute, _ in values]
        for field, (_, value) in zip(operator.attributes, values, strict=True):
            assert field.least <= value <= field.most
        BY_NAME[name].check(dict(values))


def test_nothing_of_tensorrt_is_imported():
    """TensorRT is not imported even where it is installed: the caller passes a module."""
    program = (
        "import sys, kvc_trt.backends.tensorrt.python_plugins;"
        "print([name for name in sys.modules if name.split('.')[0].startswith('tensorrt')], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "False"]
