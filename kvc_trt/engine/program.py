"""The program that an executor runs: graphs that share a weight file and the state tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from kvc_trt.errors import InputError
from kvc_trt.files.held import HeldFile
from kvc_trt.graph.state import StateTensor, cache_sites, state_tensors
from kvc_trt.graph.weights import GraphWeights
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.cache_formats import AUTO
from kvc_trt.models.config import ModelConfig
from kvc_trt.operators import PROMPT_BLOCK
from kvc_trt.runtime.executor import Limits, NoDrafts, NoTurns

if TYPE_CHECKING:
    from onnx import ModelProto

    from kvc_trt.engine import EngineDirectory

Graph: TypeAlias = "HeldFile | Callable[[], ModelProto]"
"""A graph file, or a function that builds the graph in memory when it is needed."""
NO_FILE = HeldFile(os.devnull)
"""The file or graph of a program whose executor is given its weights and reads neither."""


@dataclass(frozen=True)
class Program:
    """The graphs of an engine, or of something derived from one in memory, such as its dense twin."""

    model: ModelConfig
    parameters: PolicyParameters
    state: tuple[StateTensor, ...]
    weight_file: HeldFile
    prefill: Graph
    decode: Graph
    extend: Graph | None = None
    """None if there are no turns."""
    all_logits: bool = False
    """True if `extend` gives the logits after every token of a turn."""
    draft: Graph | None = None
    """None if drafts cannot be checked."""
    draft_tokens: int = 0
    """Tokens of a draft that `draft` checks."""
    by_bodies: bool = False
    """True if the operators' bodies run, also where an executor on a CPU has native operators."""

    @property
    def dtype(self) -> str:
        """Type of activations, and of caches whose format is `auto`."""
        return self.state[0].dtype if self.parameters.kv_cache == AUTO else self.model.dtype

    @property
    def capacities(self) -> tuple[int, ...]:
        """Slots C of each cache with tensors [G,C,D], in the order of the rows of `cache_lengths`."""
        keys = (tensor for tensor in self.state if tensor.name.startswith("k_cache"))
        slots = {tensor.cache: tensor.shape[1] for tensor in keys if tensor.cache is not None}
        return tuple(slots[cache] for cache in sorted(slots))

    @property
    def evicting(self) -> tuple[bool, ...]:
        """Per cache, whether a step drops an entry when the slots are full."""
        return tuple(site.parameters.evicts_while_decoding for site in cache_sites(self.model, self.parameters))

    @property
    def largest_budget(self) -> int:
        """The most prompt tokens that a cache that evicts keeps; 0 if none evicts."""
        rules = [site.parameters for site in cache_sites(self.model, self.parameters)]
        return max((rule.prompt_budget for rule in rules if rule.prompt_budget < rule.max_input_len), default=0)

    @property
    def limits(self) -> Limits:
        """The limits that rows must respect, whatever executor runs the program."""
        parameters = self.parameters
        return Limits(
            vocab_size=self.model.vocab_size,
            max_input_len=parameters.max_input_len,
            max_output_len=parameters.max_output_len,
            max_sequence_len=parameters.max_sequence_len,
            capacities=self.capacities,
            prompt_block=PROMPT_BLOCK,
            evicting=self.evicting,
            keeps_whole=parameters.keeps_whole,
            keeping=tuple(not site.parameters.evicts_on_turns for site in cache_sites(self.model, parameters)),
            no_turns=self._no_turns,
            all_logits=self.all_logits,
            draft_tokens=0 if self.draft is None else self.draft_tokens,
            no_drafts=self._no_drafts,
            model_positions=self.model.max_position_embeddings,
        )

    @property
    def _no_turns(self) -> NoTurns | None:
        """The reason why rows take no turns; None if they do."""
        if self.parameters.no_turn is not None:
            return NoTurns(f"policy {self.parameters.policy} takes no turns: {self.parameters.no_turn}")
        if self.extend is None:
            rebuild = "build it again: kvc-trt build --config ENGINE_DIR/config.json -o ENGINE_DIR --force"
            return NoTurns(
                "the engine has no extend graph: an earlier version built it, or it is for a backend without turns",
                rebuild,
            )
        return None

    @property
    def _no_drafts(self) -> NoDrafts | None:
        """The reason why drafts cannot be checked; None if they can."""
        if self.parameters.no_drafts is not None:
            return NoDrafts(f"policy {self.parameters.policy} checks no drafts: {self.parameters.no_drafts}")
        if self.draft is None:
            again = "kvc-trt build --config ENGINE_DIR/config.json --draft-tokens 4 -o ENGINE_DIR --force"
            return NoDrafts("the engine has no draft graph: it was built without --draft-tokens", again)
        return None

    @property
    def weight_format(self) -> str:
        """Return the format in which the weights are stored."""
        return GraphWeights(self.weight_file).precision


def engine_program(engine: EngineDirectory) -> Program:
    """Return the program of an engine directory."""
    return Program(
        engine.model, engine.parameters, engine.state, engine.weight_file,
        engine.prefill_graph, engine.decode_graph, engine.extend_graph, bool(engine.build.all_logits),
        engine.draft_graph, engine.build.draft_tokens or 0,
    )  # fmt: skip


def policy_program(model: ModelConfig, parameters: PolicyParameters, weight_file: HeldFile, *, turns: bool) -> Program:
    """Return the program of a policy over a weight file; its graphs exist in memory. `turns` where the policy can."""
    from kvc_trt.graph.build import build_decode, build_extend, build_prefill

    weights, turns = GraphWeights(weight_file), turns and parameters.no_turn is None
    return Program(
        model,
        parameters,
        state_tensors(model, parameters, weights.dtype, turns=turns),
        weight_file,
        lambda: build_prefill(model, parameters, weights=weights, turns=turns),
        lambda: build_decode(model, parameters, weights=weights),
        (lambda: build_extend(model, parameters, weights=weights)) if turns else None,
    )


def twin_program(engine: EngineDirectory | Program) -> Program:
    """Return the dense twin, which evicts and skips nothing. It shares the weight file; its graphs exist in memory."""
    model, parameters, weights = engine.model, engine.parameters, GraphWeights(engine.weight_file)
    dense = parameters.keeping_everything()
    return Program(
        model,
        dense,
        state_tensors(model, dense, weights.dtype),
        engine.weight_file,
        lambda: build_twin_prefill(model, parameters, weights=weights),
        lambda: build_twin_decode(model, parameters, weights=weights),
    )


def read_graph(graph: Graph) -> ModelProto:
    """Return the graph without its weights; InputError for a file that holds none."""
    import onnx
    from google.protobuf.message import DecodeError

    if not isinstance(graph, HeldFile):
        return graph()
    try:
        return onnx.load_model_from_string(graph.read())
    except DecodeError as error:
        raise InputError(f"{graph.path} is not an ONNX graph", hint=graph.hint) from error


def split_by_graph(names: Collection[str], *graphs: Graph) -> list[list[str]]:
    """Return, for each graph, the sorted `names` it produces; ValueError for a name that no graph produces."""
    if not names:
        return [[] for _ in graphs]
    produced = [{name for node in read_graph(graph).graph.node for name in node.output} for graph in graphs]
    for name in names:
        if not any(name in values for values in produced):
            raise ValueError(f"no graph of the engine produces the value {name!r}")
    return [sorted(values.intersection(names)) for values in produced]


def build_twin_prefill(config: ModelConfig, parameters: PolicyParameters, *, weights: GraphWeights) -> ModelProto:
    """The twin's prefill graph; its state tensors are those of `parameters.keeping_everything()`."""
    from kvc_trt.graph.build import build_prefill

    return build_prefill(config, parameters.keeping_everything(), weights=weights)


def build_twin_decode(config: ModelConfig, parameters: PolicyParameters, *, weights: GraphWeights) -> ModelProto:
    """The twin's decode graph: bit-identical to the engine's as long as every row fits the engine's dense limit."""
    from kvc_trt.graph.build import build_decode

    return build_decode(config, parameters.keeping_everything(), weights=weights, slice_until=parameters.slice_limit)
