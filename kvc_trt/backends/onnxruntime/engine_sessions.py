"""Load ONNX Runtime's sessions of an engine's graphs, with exposed values and profiles."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from kvc_trt.backends.onnxruntime.loading import LoadOptions, load_graph, prepared_graph, run_bound
from kvc_trt.backends.onnxruntime.native import BF16, NativeOperators, native_operators
from kvc_trt.backends.onnxruntime.packed_copies import passes_pack, steps_pack
from kvc_trt.backends.onnxruntime.prefill.loaded_parts import PartLoader
from kvc_trt.backends.onnxruntime.prefill.part_trials import Trials
from kvc_trt.backends.onnxruntime.prefill.sliced_prefill import SlicedPrefill
from kvc_trt.backends.onnxruntime.shared_weights import SharedWeights
from kvc_trt.backends.run_options import DEFAULTS, PrefillPrecision, RunOptions
from kvc_trt.engine.program import Graph, Program, engine_program, read_graph, split_by_graph
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.graph.prefill_parts import cut_prefill
from kvc_trt.graph.weights import GraphWeights
from kvc_trt.machine import usable_cores
from kvc_trt.operators.quantised_linear import CONTRIBUTED_PRODUCT

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, IOBinding
    from onnxruntime import RunOptions as RunSettings

    from kvc_trt.engine import EngineDirectory

GRAPHS = ("prefill", "decode", "extend", "draft")


class EngineSessions:
    """The graphs of one engine, or of a `Program` derived from one. Each is loaded when it is first needed.

    Prefill in bf16 needs native operators on a processor that multiplies bfloat16; UnsupportedEnvironment elsewhere.
    `profile` is a directory for ONNX Runtime's own profile.
    `expose` names internal values for `exposed`: index lists (`indices.{layer}` of prefill, `selected.{layer}` of
    decode, of the extend and of the draft graph), or any other value of a graph.
    """

    def __init__(
        self,
        engine: EngineDirectory | Program,
        options: RunOptions = DEFAULTS,
        *,
        profile: Path | None = None,
        expose: Collection[str] = (),
    ) -> None:
        program = engine if isinstance(engine, Program) else engine_program(engine)
        self.program = program
        self._limits = program.limits
        self._options = options
        self._check_precision()
        self._profile = profile
        with program.weight_file.steady():
            self._weights = SharedWeights(program.weight_file)
            self._quantised = GraphWeights(program.weight_file).quantised
        graphs = {
            "prefill": program.prefill, "decode": program.decode, "extend": program.extend, "draft": program.draft
        }  # fmt: skip
        present = {name: graph for name, graph in graphs.items() if graph is not None}
        found = dict(zip(present, split_by_graph(expose, *present.values()), strict=True))
        self._expose_prefill, self._expose_decode, self._expose_extend, self._expose_draft = (
            found.get(name, []) for name in GRAPHS
        )
        self._exposed: dict[str, NDArray[Any]] = {}

    @cached_property
    def _native(self) -> NativeOperators | None:
        """The library of native operators; None if the operators' bodies run."""
        return None if self.program.by_bodies else native_operators(self.program.dtype)

    @cached_property
    def prefill_session(self) -> InferenceSession:
        """The prefill graph; its weights stay mapped from the file.

        Prepacking would gain under 10%. The body of a quantised product unpacks its weights once per run, which costs
        little for a long prompt; packed copies for both graphs would take more memory than the model.
        """
        precision = self._options.prefill_precision
        return self._load("prefill", self.program.prefill, self._expose_prefill, prepack=False, prefill=precision)

    @cached_property
    def decode_session(self) -> InferenceSession:
        """The decode graph."""
        return self._load("decode", self.program.decode, self._expose_decode, prepack=self.prepacks_decode)

    @cached_property
    def extend_session(self) -> InferenceSession:
        """The extend graph, which is loaded for the first turn; its weights stay mapped from the file, like prefill's.

        ValueError if the program has none."""
        if self.program.extend is None:
            raise ValueError(str(self._limits.no_turns))
        return self._load("extend", self.program.extend, self._expose_extend, prepack=False)

    @cached_property
    def draft_session(self) -> InferenceSession:
        """The draft graph; its weights are packed if those of steps are and no native product reads them in place.

        ValueError if the program has none."""
        if self.program.draft is None:
            raise ValueError(str(self._limits.no_drafts))
        native = self._native
        prepack = passes_pack(self.prepacks_decode, quantised=self._quantised, native=native)
        return self._load("draft", self.program.draft, self._expose_draft, prepack=prepack, few_tokens=True)

    @property
    def prepacks_decode(self) -> bool:
        """True if decode copies its weights."""
        size, native = self.program.weight_file.size, self._native
        if steps_pack(size, quantised=self._quantised, native=native):
            return True
        # Graphs of older engines call ONNX Runtime's quantised product themselves, which no library replaces.
        nodes = read_graph(self.program.decode).graph.node if self._quantised else ()
        return any(node.op_type == CONTRIBUTED_PRODUCT for node in nodes)

    @property
    def cuts_prefill(self) -> bool:
        """True if a prefill can run in several slices.

        ONNX Runtime computes float16 in single precision and rounds where a graph ends: parts would round more often.
        A block of tokens of a linear layer needs the state after the block before it, which parts do not pass on.
        """
        return self.program.dtype == "float32" and not self.program.model.linear_layers

    @cached_property
    def _sliced(self) -> SlicedPrefill:
        options = LoadOptions(
            self._options.threads, prepack=False, dtype=self.program.dtype, prefill=self._options.prefill_precision,
            prepared=True, shares_buffers=True, by_bodies=self.program.by_bodies,
        )  # fmt: skip
        # The graph is cut after fusion, so nodes that native operators fuse in the whole graph are fused in its parts
        # too.
        parts = cut_prefill(prepared_graph(self.program.prefill, options, self._expose_prefill), self._expose_prefill)
        loader = PartLoader(parts, self._weights, options)
        trials = Trials(self.program.largest_budget, self._limits.max_sequence_len)
        return SlicedPrefill(parts, loader, trials, self._options.threads or usable_cores(), self._expose_prefill)

    def exposed(self, name: str) -> NDArray[Any]:
        """Return an exposed value of the latest run of its graph; index lists are INT32 [B,G,width]."""
        return self._exposed[name]

    def end_profiling(self) -> dict[str, Path]:
        """Close ONNX Runtime's profiles and return the files of the graphs that were loaded, by the graph's name."""
        loaded = {name: self.__dict__.get(f"{name}_session") for name in GRAPHS}
        return {name: Path(session.end_profiling()) for name, session in loaded.items() if session is not None}

    def _check_precision(self) -> None:
        """Raise UnsupportedEnvironment if this library or processor cannot compute prefill as requested."""
        if self._options.prefill_precision == "bf16":
            native = self._native
            if native is None or native.instructions != BF16:
                found = "the operators' bodies" if native is None else native.describe()
                raise UnsupportedEnvironment(
                    f"prefill in bf16 on onnxruntime: expected native operators ({BF16}), found {found}",
                    hint="--prefill-precision f32, or --backend openvino",
                )

    def _load(
        self,
        name: str,
        graph: Graph,
        expose: list[str],
        *,
        prepack: bool,
        prefill: PrefillPrecision | None = None,
        few_tokens: bool = False,
    ) -> InferenceSession:
        prefix = None if self._profile is None else self._profile / name
        options = LoadOptions(
            self._options.threads, prepack, prefix, self.program.dtype, prefill, self._weights, few_tokens=few_tokens,
            by_bodies=self.program.by_bodies,
        )  # fmt: skip
        with self.program.weight_file.steady():
            return load_graph(graph, options, expose)

    def _run(
        self, session: InferenceSession, binding: IOBinding, expose: list[str], settings: RunSettings | None = None
    ) -> None:
        run_bound(session, binding, settings)
        if expose:
            values = binding.get_outputs()[-len(expose) :]
            self._exposed.update((name, value.numpy()) for name, value in zip(expose, values, strict=True))
