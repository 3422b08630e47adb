"""Every Python plugin against its C++ plugin, question by question, where TensorRT's headers are found."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvc_trt.backends.tensorrt.python_plugins import Refusal
from kvc_trt.backends.tensorrt.python_plugins.calls import output_shapes
from kvc_trt.operators.registry import KERNEL_OPERATORS
from kvc_trt.operators.schema import Operator
from tests.backends.tensorrt import rtx
from tests.backends.tensorrt.plugin_cases import (
    TYPES,
    RawField,
    fields_with_defaults,
    good_fields,
    graph_fields,
    malformed,
    raw,
)
from tests.backends.tensorrt.python_plugins_program import NUMBERS
from tests.backends.tensorrt.test_python_plugins_methods import (
    NONE,
    SIZES,
    every_operator,
    fixed,
    python_plugin,
    ranged,
    sizes_of,
)
from tests.plugins_cuda.tensorrt import toolchain
from tests.plugins_cuda.tensorrt.conftest import plugins

__all__ = ["plugins", "python_plugin"]

pytestmark = pytest.mark.tensorrt

TEXT = 4096


@pytest.fixture
def trt():
    return rtx.load_or_skip()


class CField(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("type", ctypes.c_int32),
        ("length", ctypes.c_int32),
        ("data", ctypes.c_void_p),
    )


class CTensor(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("min", ctypes.c_int64 * 8),
        ("max", ctypes.c_int64 * 8),
    )


class CppPlugin:
    """One plugin of the C++ library, with the answers of plugin_questions.cpp."""

    def __init__(self, library: CppLibrary, operator: Operator, handle: int) -> None:
        self._library, self._handle = library, ctypes.c_void_p(handle)
        self._counts = len(operator.inputs), len(operator.outputs)

    def fields(self) -> dict[str, int]:
        text = ctypes.create_string_buffer(TEXT)
        assert self._ask("serialised", text, TEXT) >= 0
        return {name: int(value) for name, value in (word.split("=") for word in text.value.decode().split())}

    def output_types(self, types: list[int]) -> list[int] | str:
        found = (ctypes.c_int32 * self._counts[1])()
        status = self._ask("output_types", (ctypes.c_int32 * len(types))(*types), len(types), found, len(found))
        return list(found) if status == 0 else self._library.reason()

    def output_shapes(self, shapes: list[str]) -> list[str] | str:
        text = ctypes.create_string_buffer(TEXT)
        words = (ctypes.c_char_p * len(shapes))(*(shape.encode() for shape in shapes))
        status = self._ask("output_shapes", words, len(shapes), self._counts[1], text, TEXT)
        return text.value.decode().splitlines() if status == 0 else self._library.reason()

    def aliased(self, output: int) -> int:
        return self._ask("aliased", output)

    def supports(self, position: int, tensors) -> bool:
        return bool(self._ask("supports", position, (CTensor * len(tensors))(*tensors), *self._counts))

    def configure(self, tensors) -> str | None:
        return self._library.reason() if self._tensors("configure", tensors) else None

    def change(self, tensors) -> str | None:
        return self._library.reason() if self._tensors("change", tensors) else None

    def workspace(self, tensors) -> int:
        return self._tensors("workspace", tensors)

    def _tensors(self, question: str, tensors) -> int:
        return self._ask(question, (CTensor * len(tensors))(*tensors), *self._counts)

    def _ask(self, question: str, *arguments):
        return getattr(self._library.driver, f"kvc_test_{question}")(self._handle, *arguments)

    def __del__(self) -> None:
        self._ask("drop")


@dataclass
class CppLibrary:
    """The C++ plugins over the emulated kernels."""

    driver: ctypes.CDLL
    handle: ctypes.c_void_p

    def reason(self) -> str:
        return self.driver.kvc_test_reason(self.handle).decode()

    def make(
        self, operator: Operator, fields: list[RawField] | None = None, *, numbers: Mapping[str, int] = NONE
    ) -> CppPlugin | str:
        """Return a plugin, or the reason of its refusal."""
        fields = raw(good_fields(operator.name, numbers)) if fields is None else fields
        data = [np.array(field.values, NUMBERS[field.type]) for field in fields]
        rows = [
            CField(field.name.encode(), TYPES[field.type], len(field.values), values.ctypes.data)
            for field, values in zip(fields, data, strict=True)
        ]
        made = self.driver.kvc_test_make(self.handle, operator.name.encode(), (CField * len(rows))(*rows), len(rows))
        return CppPlugin(self, operator, made) if made else self.reason()


@pytest.fixture
def cpp(plugins) -> CppLibrary:
    source = Path(__file__).with_name("plugin_questions.cpp")
    path = toolchain.compile_cpp("libplugin_questions.so", "-shared", source, "-ldl")
    driver = ctypes.CDLL(str(path))
    for name, result in (("open", "void_p"), ("make", "void_p"), ("reason", "char_p"), ("workspace", "uint64")):
        getattr(driver, f"kvc_test_{name}").restype = getattr(ctypes, f"c_{result}")
    return CppLibrary(driver, ctypes.c_void_p(driver.kvc_test_open(str(plugins).encode())))


def test_fields_of_the_graphs_make_the_same_plugins(cpp):
    by_name = {operator.name: operator for operator in KERNEL_OPERATORS}
    for name, fields in graph_fields():
        plugin = cpp.make(by_name[name], raw(dict(fields)))
        assert isinstance(plugin, CppPlugin)
        assert list(plugin.fields().items()) == list(fields_with_defaults(name, dict(fields)).items())


def test_every_malformed_field_is_refused_in_the_same_words(cpp):
    """The lines are the Python plugins', which test_python_plugins_registry.py asks them for."""
    by_name = {operator.name: operator for operator in KERNEL_OPERATORS}
    for case in malformed():
        assert cpp.make(by_name[case.operator], list(case.fields)) == case.line


# --- symbolic shapes: no module of TensorRT is needed ---


@dataclass(frozen=True)
class Text:
    """An expression that prints itself, as those of fake_builder.h do."""

    text: str

    def is_constant(self) -> bool:
        return self.text.lstrip("-").isdigit()

    def get_constant_value(self) -> int:
        return int(self.text)


class TextBuilder:
    def constant(self, value: int) -> Text:
        return Text(str(value))

    def operation(self, sign: str, left: Text, right: Text) -> Text:
        return Text(f"({left.text}{sign}{right.text})")


SIGNS = SimpleNamespace(PROD="*", SUM="+")
"""DimensionOperation"""

IN_16_BIT = {"CACHE": 1, "FLOAT16": 1, "INT64": 8, "INT32": 3, "INT8": 2}
"""DataType"""


def python_shapes(operator: Operator, shapes: list[str], *, numbers: Mapping[str, int]) -> list[str] | str:
    inputs = [[Text(word) for word in shape.split()] for shape in shapes]
    try:
        found = output_shapes(operator, good_fields(operator.name, numbers), inputs, TextBuilder(), SIGNS, 2)
    except Refusal as refusal:
        return f"kvc plugin: {operator.name}: {refusal}"
    return [" ".join(expr.text for expr in shape) for shape in found]


@every_operator
def test_output_shapes_are_the_same_expressions_or_refusals(cpp, operator, numbers):
    plugin, sizes = cpp.make(operator, numbers=numbers), sizes_of(operator, numbers=numbers)
    shapes = [list(tensor.shape) for tensor in operator.inputs]
    elements = [operator.element_of(tensor, good_fields(operator.name, numbers)) for tensor in operator.inputs]
    assert isinstance(plugin.output_types([IN_16_BIT[element] for element in elements]), list)
    refused = 0
    known_sets = ([], ["D"], ["C"], ["C", "P"], ["D", "2D"], ["H", "G", "D", "W", "C", "P", "2D"], list(sizes))
    for known in known_sets:
        base = [[str(sizes[s]) if s in known else s.replace("2D", "E") for s in shape] for shape in shapes]
        for variant in _variants(base):
            words = [" ".join(shape) for shape in variant]
            expected = plugin.output_shapes(words)
            assert python_shapes(operator, words, numbers=numbers) == expected, words
            refused += isinstance(expected, str)
    assert refused > 20


def _variants(base: list[list[str]]):
    """The inputs unchanged; then every dimension as another constant or symbol, every rank one less and one more."""
    yield base
    for index, shape in enumerate(base):
        changed = [[*shape[:axis], word, *shape[axis + 1 :]] for axis in range(len(shape)) for word in ("5", "X", "0")]
        for wrong in (*changed, shape[:-1], [*shape, "1"]):
            yield [*base[:index], wrong, *base[index + 1 :]]


# --- what takes TensorRT's own descriptions ---


def c_step(desc) -> CTensor:
    dims = tuple(desc.dims)
    return CTensor(int(desc.type), int(desc.format), len(dims), (ctypes.c_int64 * 8)(*dims))


def c_range(desc) -> CTensor:
    low, high = ((ctypes.c_int64 * 8)(*end) for end in (desc.min, desc.max))
    return CTensor(int(desc.desc.type), int(desc.desc.format), len(tuple(desc.min)), low, high)


def refusal_of(action, *arguments) -> str | None:
    try:
        action(*arguments)
    except Refusal as refusal:
        return str(refusal)
    return None


def same_refusal(python: str | None, cplusplus: str | None) -> bool:
    """A reason of the C ABI comes with the names of its function and of its status in Python."""
    if python is None or cplusplus is None or python == cplusplus:
        return python == cplusplus
    *where, reason = cplusplus.split(": ", 2)
    return python.startswith(": ".join(where)) and f"_workspace: {reason} (" in python


@every_operator
def test_aliases_are_the_same(cpp, trt, python_plugin, operator, numbers):
    python, plugin = python_plugin(operator, numbers=numbers), cpp.make(operator, numbers=numbers)
    for output in (-1, *range(9), 2**31 - 1):
        assert python.get_aliased_input(output) == plugin.aliased(output)


@every_operator
def test_types_of_outputs_are_the_same(cpp, trt, python_plugin, operator, numbers):
    python, plugin = python_plugin(operator, numbers=numbers), cpp.make(operator, numbers=numbers)
    types = list(trt.DataType.__members__.values())
    for cache_type in types:
        right = [desc.type for desc in fixed(trt, operator, cache_type, numbers=numbers)[0]]
        wrong = [[*right[:i], kind, *right[i + 1 :]] for i in range(len(right)) for kind in types]
        for kinds in (right, *wrong):
            expected = plugin.output_types([int(kind) for kind in kinds])
            try:
                found = [int(kind) for kind in python.get_output_data_types(kinds)]
            except Refusal as refusal:
                found = str(refusal)
            assert found == expected


@every_operator
def test_formats_are_the_same(cpp, trt, python_plugin, operator, numbers):
    python, plugin = python_plugin(operator, numbers=numbers), cpp.make(operator, numbers=numbers)
    served = 0
    for cache_type in trt.DataType.__members__.values():
        tensors = [desc for part in ranged(trt, operator, (1, 4), (8, 64), numbers=numbers) for desc in part]
        kinds = [desc.type for part in fixed(trt, operator, cache_type, numbers=numbers) for desc in part]
        for desc, kind in zip(tensors, kinds, strict=True):
            desc.desc.type = kind
        for position, (kind, layout) in product(
            range(len(tensors)), product(trt.DataType.__members__.values(), ("LINEAR", "CHW32", "HWC"))
        ):
            tensors[position].desc.type, tensors[position].desc.format = kind, getattr(trt.TensorFormat, layout)
            found = python.supports_format_combination(position, tensors, len(operator.inputs))
            assert found == plugin.supports(position, [c_range(desc) for desc in tensors])
            served += found
            tensors[position].desc.type, tensors[position].desc.format = kinds[position], trt.TensorFormat.LINEAR
    assert served > 0


@every_operator
def test_profiles_workspaces_and_their_refusals_are_the_same(cpp, trt, python_plugin, operator, numbers):
    python, plugin = python_plugin(operator, numbers=numbers), cpp.make(operator, numbers=numbers)
    refused = set()
    changes = ({}, {"H": 3}, {"H": 34}, {"D": 20, "2D": 40}, {"2D": 33}, {"P": 7}, {"W": 2000}, {"G": 0}, {"C": 5})
    for (batch, prompt), change in product([((1, 32), (1, 4096)), ((0, 4), (8, 64)), ((2, 2), (300, 300))], changes):
        profile = ranged(trt, operator, batch, prompt, numbers=numbers, **change)
        raw_profile = [c_range(desc) for part in profile for desc in part]
        found, expected = refusal_of(python.configure_plugin, *profile), plugin.configure(raw_profile)
        assert same_refusal(found, expected), (found, expected)
        assert python.get_workspace_size(*profile) == plugin.workspace(raw_profile)
        refused.add(expected)
    assert None in refused
    assert len(refused) > 3


@every_operator
def test_shapes_of_a_step_and_their_refusals_are_the_same(cpp, trt, python_plugin, operator, numbers):
    python, plugin = python_plugin(operator, numbers=numbers), cpp.make(operator, numbers=numbers)
    assert set(SIZES) <= set(sizes_of(operator, numbers=numbers))
    tensors = [len(operator.inputs), len(operator.outputs)]
    refused = 0
    for part in range(2):
        for index in range(tensors[part]):
            for size, axis in product((-1, 0, 7, 2**31, 2**40, -(2**63), 2**63 - 1), range(4)):
                described = fixed(trt, operator, numbers=numbers)
                dims = list(described[part][index].dims)
                if axis >= len(dims):
                    continue
                dims[axis] = size
                described[part][index].dims = tuple(dims)
                found = refusal_of(python.on_shape_change, *described)
                expected = plugin.change([c_step(desc) for half in described for desc in half])
                assert same_refusal(found, expected), (found, expected)
                refused += expected is not None
    assert refused > 50


def test_a_graph_becomes_the_same_network_and_a_plan(ask_parser, plugins):
    """NVIDIA's parser over the C++ library and over the Python plugins."""
    from kvc_trt.backends.tensorrt.lowering import PLUGINS, lower
    from tests.backends.tensorrt.weightless import weightless_graphs, weights_as_inputs
    from tests.graph.small_models import LLAMA, resolve

    parameters = resolve("rocketkv", skip_layers=1)
    graphs = [
        weights_as_inputs(lower(graph, tensorrt=(11, 4), plugins=PLUGINS))
        for graph in weightless_graphs(LLAMA, parameters, "bf16")
    ]
    cplusplus, python = (ask_parser(*graphs, plugins=kind, plan=True) for kind in (plugins, "python"))
    for one, other in zip(cplusplus, python, strict=True):
        assert one["plan_bytes"] > 0
        assert other["plan_bytes"] > 0
        keys = ("parsed", "errors", "plugins", "kinds", "outputs", "problem")  # aliases of C++ are not seen from Python
        assert {key: one[key] for key in keys} == {key: other[key] for key in keys}
        assert other["problem"] is None
