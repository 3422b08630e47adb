"""Load a TensorRT engine directory onto the GPU, after checking everything.

An engine is executable code, and so is a plugin library. Before TensorRT sees either, the directory's hashes
(`EngineDirectory.open`), this machine against the manifest's record (`requirements`), and the plugin library's own hash
are checked. Host code inside an engine is not allowed to run.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvc_trt.backends.tensorrt.building.builder import build_plan
from kvc_trt.backends.tensorrt.building.profiles import (
    Profile,
    SizeRange,
    choose_profile,
    extend_profiles,
    longest_turn,
)
from kvc_trt.backends.tensorrt.format import GRAPHS, plan_file
from kvc_trt.backends.tensorrt.lowering.checks import check_aliases, engine_aliases
from kvc_trt.backends.tensorrt.lowering.outputs import BEST, LOGITS
from kvc_trt.backends.tensorrt.machine import GpuMachine, inspect_machine
from kvc_trt.backends.tensorrt.module import Messages, TensorRT, load_tensorrt
from kvc_trt.backends.tensorrt.plugins import PluginLibrary, load_plugins
from kvc_trt.backends.tensorrt.requirements import BuiltFor, library_of, missing_for, refuse
from kvc_trt.backends.tensorrt.running.context import sizes_of
from kvc_trt.backends.tensorrt.running.memory import BufferSizes, DevicePlan, EngineBytes, check_fits, plan_memory
from kvc_trt.engine.manifest import rebuild_hint
from kvc_trt.errors import UnsupportedEnvironment

if TYPE_CHECKING:
    import tensorrt as trt
    from onnx import ModelProto

    from kvc_trt.engine import EngineDirectory
    from kvc_trt.files.held import HeldFile
    from kvc_trt.graph.state import StateTensor


@dataclass(frozen=True)
class LoadedEngine:
    """The plans on the GPU, and the objects that must live as long as they do."""

    prefill: trt.ICudaEngine
    decode: trt.ICudaEngine
    toolkit: Toolkit
    plan_bytes: int
    """The size of all plans in bytes."""
    extend: trt.ICudaEngine | None = None
    """None if there are no turns."""

    @property
    def tensorrt(self) -> TensorRT:
        """The TensorRT module that loaded them."""
        return self.toolkit.tensorrt

    def activation_bytes(self, rows: int) -> int:
        """Return the bytes of the largest graph's largest run, with steps of this many rows; they run one at a time."""
        step = choose_profile(profiles_of(self.decode, "token"), rows)
        others = [
            engine.get_device_memory_size_for_profile_v2(index)
            for engine in (self.prefill, self.extend)
            if engine is not None
            for index in range(engine.num_optimization_profiles)
        ]
        return int(max(self.decode.get_device_memory_size_for_profile_v2(step), *others))


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of an engine as TensorRT reports it."""

    name: str
    is_input: bool
    dtype: str
    """TensorRT's name of the type, one of DTYPES."""
    shape: tuple[int, ...]
    """Dimensions, -1 for an open one."""
    on_device: bool


DTYPES = {
    "float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int64": "INT64", "int32": "INT32", "int8": "INT8"
}  # fmt: skip
"""TensorRT's names of the types of state tensors and small inputs."""


def check_engine(engine: EngineDirectory, machine: GpuMachine) -> PluginLibrary:
    """Return the plugin library for this engine, whose directory has been checked.

    Raises for the first thing that keeps this machine from running it, with what was expected, what was found and what
    to do. Nothing is loaded.
    """
    target = BuiltFor.of(engine.manifest.target, str(engine.path))
    refuse(missing_for(target, machine, rebuild_hint(engine.path)))
    return library_of(target, machine)


@dataclass(frozen=True)
class Toolkit:
    """TensorRT with the checked GPU and plugin library, ready to load engines."""

    tensorrt: TensorRT
    library: PluginLibrary
    gpu: str
    hint: str
    """The command that rebuilds the engine."""
    runtime: trt.Runtime
    messages: Messages
    keep: tuple[Any, ...]
    """The plugins and the logger, which must outlive everything made here."""

    def build(self, model: ModelProto, weights: HeldFile | None, profiles: Sequence[Profile]) -> bytes:
        """Build the plan of a graph in memory."""
        return build_plan(self.tensorrt, model, weights, profiles)

    def deserialise(self, plan: bytes | mmap.mmap, name: str) -> trt.ICudaEngine:
        """Load a plan onto the GPU; UnsupportedEnvironment with TensorRT's reason if it is refused."""
        engine = self.runtime.deserialize_cuda_engine(plan)
        if engine is None:
            message = f"TensorRT {self.tensorrt.__version__} cannot load the {name} engine: {self.messages.reason()}"
            raise UnsupportedEnvironment(message, hint=self.hint)
        return engine

    def load(self, plans: Mapping[str, bytes | mmap.mmap], state: Sequence[StateTensor]) -> LoadedEngine:
        """Load the plans of the graphs, by name, onto the GPU; they must have exactly this state."""
        engines = {name: self.deserialise(plan, name) for name, plan in plans.items()}
        loaded = LoadedEngine(**engines, toolkit=self, plan_bytes=sum(map(len, plans.values())))
        check_state(loaded, state)
        return loaded


def open_toolkit(engine: EngineDirectory) -> Toolkit:
    """Check the machine against the engine, then load TensorRT and the plugins."""
    machine = inspect_machine(ask_libraries=False)
    library = check_engine(engine, machine)
    assert machine.gpu is not None
    check_fits(plan_before_loading(engine), machine.gpu.free_bytes)
    tensorrt, messages = load_tensorrt(), Messages()
    plugins, logger = load_plugins(library, tensorrt), messages.logger(tensorrt)
    runtime = tensorrt.Runtime(logger)  # safe, since there is a driver; without one it would crash later
    if runtime.engine_host_code_allowed:
        raise UnsupportedEnvironment("TensorRT's runtime would run host code of an engine; expected it not to")
    hint = rebuild_hint(engine.path)
    return Toolkit(tensorrt, library, machine.gpu.name, hint, runtime, messages, (plugins, logger))


def load(engine: EngineDirectory) -> LoadedEngine:
    """Check and load an engine; UnsupportedEnvironment if TensorRT refuses it after all checks."""
    toolkit = open_toolkit(engine)
    files = {name: engine.held[plan_file(name)] for name in _graphs_of(engine)}
    with contextlib.ExitStack() as stack:
        for file in files.values():
            stack.enter_context(file.steady())
        # Mapped: an engine of 16 GB need not be copied into host memory first.
        return toolkit.load({name: file.map() for name, file in files.items()}, engine.state)


def _graphs_of(engine: EngineDirectory) -> list[str]:
    return [name for name in GRAPHS if plan_file(name) in engine.files]


def plan_before_loading(engine: EngineDirectory) -> DevicePlan:
    """Plan the memory for one row; all but the activations is known from the directory."""
    sizes = {name: engine.files[plan_file(name)].size for name in _graphs_of(engine)}
    weights = EngineBytes(sizes["prefill"], sizes["decode"], 0, "size of the file", sizes.get("extend", 0))
    longest = engine.parameters.max_input_len
    turn = longest_turn(extend_profiles(longest)) if "extend" in sizes else 0
    return plan_memory(engine.model.vocab_size, engine.state, weights, BufferSizes(1, 1, longest, turn))


def check_state(loaded: LoadedEngine, state: Sequence[StateTensor]) -> None:
    """Raise unless all plans have exactly this state on the device, update it in place, and decode has `best`."""
    outputs = {tensor.name for tensor in tensors_of(loaded.decode) if not tensor.is_input}
    updating = [("decode", loaded.decode, [tensor for tensor in state if tensor.in_step])]
    if loaded.extend is not None:
        updating.append(("extend", loaded.extend, list(state)))
    problems = [
        *(f"decode: {name} is missing" for name in (LOGITS, BEST) if name not in outputs),
        *state_problems("prefill", tensors_of(loaded.prefill), [(t.name, t, False) for t in state]),
    ]
    for graph, engine, own in updating:
        problems += state_problems(graph, tensors_of(engine), [(t.name, t, True) for t in own])
        problems += state_problems(graph, tensors_of(engine), [(t.aliased_output, t, False) for t in own])
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UnsupportedEnvironment(
            f"the engine's tensors differ from config.json: {'; '.join(problems[:3])}{more}",
            hint="build it again with --force",
        )
    for _, engine, own in updating:
        check_aliases(engine_aliases(engine), {tensor.aliased_output: tensor.name for tensor in own})


def state_problems(
    graph: str, found: Iterable[TensorInfo], wanted: Iterable[tuple[str, StateTensor, bool]]
) -> list[str]:
    """Return the problems of a graph's tensors, given (name, state tensor, whether an input) of each expected one."""
    by_name = {tensor.name: tensor for tensor in found}
    problems = [f"{graph}: {name} is on the host" for name, tensor in by_name.items() if not tensor.on_device]
    for name, tensor, is_input in wanted:
        expected = TensorInfo(name, is_input, DTYPES[tensor.dtype], (-1, *tensor.shape), True)
        if (actual := by_name.get(name)) is None:
            problems.append(f"{graph}: {name} is missing")
        elif actual.on_device and actual != expected:
            problems.append(f"{graph}: {name}: expected {_describe(expected)}, found {_describe(actual)}")
    return problems


def tensors_of(engine: trt.ICudaEngine) -> list[TensorInfo]:
    """Return the inputs and outputs of an engine."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    return [
        TensorInfo(
            name,
            engine.get_tensor_mode(name).name == "INPUT",
            engine.get_tensor_dtype(name).name,
            sizes_of(engine.get_tensor_shape(name)),
            engine.get_tensor_location(name).name == "DEVICE",
        )
        for name in names
    ]


def profiles_of(engine: trt.ICudaEngine, name: str) -> tuple[Profile, ...]:
    """Return an engine's optimisation profiles, read from the ranges of one input: [batch] or [batch,sequence]."""
    profiles = []
    for index in range(engine.num_optimization_profiles):
        least, best, most = (sizes_of(dims) for dims in engine.get_tensor_profile_shape(name, index))
        ranges = [SizeRange(*sizes) for sizes in zip(least, best, most, strict=True)]
        profiles.append(Profile(ranges[0], ranges[1] if len(ranges) > 1 else None))
    return tuple(profiles)


def _describe(tensor: TensorInfo) -> str:
    direction = "input" if tensor.is_input else "output"
    return f"{direction} {tensor.dtype} [{','.join('B' if size < 0 else str(size) for size in tensor.shape)}]"
