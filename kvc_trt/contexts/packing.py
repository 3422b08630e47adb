"""Turn one row's state tensors into the tensors of a context, and back.

A context holds the slots in use, contiguous, and the state of linear layers. Tensors that follow from the stored keys
bit for bit (page bounds, keys by channel) are left out and rebuilt; the policy's kind of selection lists them. All
others are copied unchanged.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kvc_trt.engine.format import WEIGHTS_FILE
from kvc_trt.engine.manifest import digest_of
from kvc_trt.engine.program import Program, engine_program
from kvc_trt.graph.state import ITEM_SIZE, CacheSite, StateTensor, cache_sites, parts_in_step, with_other_turns
from kvc_trt.methods.base.constants import ADDED_LATER
from kvc_trt.models.cache_formats import AUTO
from kvc_trt.models.config import ModelDescription
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.operators.cached_vectors import cached_vectors
from kvc_trt.operators.schema import part_names
from kvc_trt.operators.tensors import K_CACHE, V_CACHE
from kvc_trt.runtime.context import Array, Context, Fingerprint, OtherTurns
from kvc_trt.runtime.executor import Limits

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.methods.base.parameters import PolicyParameters
    from kvc_trt.models.config import ModelConfig

SHORT_NAMES = {K_CACHE.name: "k", V_CACHE.name: "v"}
"""Name of a state tensor -> its name in a context, if the two differ."""

Cache: TypeAlias = "tuple[CacheSite, Mapping[str, StateTensor]]"
"""A cache and its state tensors by kind: k_cache, v_cache, and any further ones."""
OLDER_THAN_CONTEXTS = frozenset(("future_positions", "max_conversation_len"))
"""Parameters that older engines lack, and that every context has."""
LONGEST_NAME = 200
"""The most characters of a name in a fingerprint, all of them printable ASCII."""


class RowPacking:
    """The `Packing` of one program."""

    def __init__(self, program: Program, fingerprint: Fingerprint) -> None:
        self._fingerprint = fingerprint
        self.limits: Limits = program.limits
        self._caches = caches_of(program.model, program.parameters, program.state)
        self._linear = linear_of(program.state)
        self.other_turns = _other_turns(program)
        """The engine that differs from this one only in whether it takes turns; None if no state is kept for turns."""

    @property
    def fingerprint(self) -> Fingerprint:
        """The identity of the engine that makes these contexts."""
        return self._fingerprint

    @property
    def keeps_every_token(self) -> bool:
        """True if every token of the text stays stored, so that a later turn can read it."""
        return all(site.parameters.keeps_every_token for site, _ in self._caches)

    @property
    def reads_everything(self) -> bool:
        """True if a step reads every stored token."""
        return not any(site.parameters.reads_a_part for site, _ in self._caches)

    def layout(self, cache_lengths: Sequence[int], logical_length: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return type and shape of every tensor of a context with these lengths, by its name there."""
        return _layout(self._caches, self._linear, cache_lengths, logical_length)

    def pack(self, row: Mapping[str, Array], cache_lengths: Iterable[int], logical_length: int) -> dict[str, Array]:
        """Return copies of a row's tensors, without empty slots and without tensors that `unpack` can rebuild."""
        lengths, found = tuple(cache_lengths), {}
        for site, tensors in self._caches:
            for kind, tensor in _carried(site, tensors).items():
                used = _used(kind, site, tensors, lengths, logical_length)
                found[_name(kind, site)] = np.array(row[tensor.name][:, :used], order="C")
        return found | {tensor.name: np.array(row[tensor.name], order="C") for tensor in self._linear}

    def nbytes(self, cache_lengths: Sequence[int], logical_length: int) -> int:
        """Return the bytes of a context with these lengths: its tensors and the logits."""
        return _bytes_of(self.layout(cache_lengths, logical_length), self.limits.vocab_size)

    def unpack(self, context: Context) -> Iterator[tuple[str, Array]]:
        """Yield every state tensor of a row with its name, in the shape of one row; they are made one by one."""
        for site, tensors in self._caches:
            rule, keys = site.parameters, {}
            names = part_names(K_CACHE, rule.cache_format.keys)
            for kind, tensor in _carried(site, tensors).items():
                stored = context.tensors[_name(kind, site)]
                if stored.shape != tensor.shape:
                    whole = np.full(tensor.shape, tensor.fill, numpy_dtype(tensor.dtype))
                    whole[:, : stored.shape[1]] = stored
                    stored = whole
                if kind in names:
                    keys[kind] = stored[None]
                yield tensor.name, stored
            kept = np.array([_kept(site, tensors, context.cache_lengths)])
            for kind, rebuild in rule.selection.rebuilt.items():
                vectors = cached_vectors(keys, K_CACHE, rule.cache_format)
                yield tensors[kind].name, rebuild(vectors, kept, rule, numpy_dtype(tensors[kind].dtype))[0]
        for one in self._linear:
            yield one.name, context.tensors[one.name]


def packing_of(engine: EngineDirectory, program: Program | None = None) -> RowPacking:
    """Return the packing of an engine directory, or of another `program` over its model and weights."""
    return RowPacking(program or engine_program(engine), fingerprint_of(engine, program))


def fingerprint_of(engine: EngineDirectory, program: Program | None = None) -> Fingerprint:
    """Return the fingerprint of an engine directory, or of another `program` over its weights, for its contexts."""
    parameters, state, build = (program or engine).parameters, (program or engine).state, engine.build
    model_name = f"{Path(build.model).name} ({build.weights} weights)"
    return Fingerprint(
        engine=engine.digest,
        weights=engine.files[WEIGHTS_FILE].sha256,
        model=digest_of(recorded_model(engine.model)),
        parameters=digest_of(recorded(parameters)),
        state=_state_digest(state),
        model_name=re.sub(r"[^\x20-\x7e]", "?", model_name)[:LONGEST_NAME],
        policy_name=f"{parameters.policy}, token budget {parameters.token_budget}",
        kv_cache=parameters.kv_cache,
    )


def recorded(parameters: PolicyParameters) -> dict[str, Any]:
    """Return the parameters for a digest; those that the first contexts did not have are left out at their defaults."""
    unknown = ADDED_LATER - OLDER_THAN_CONTEXTS
    fields = ((field, getattr(parameters, field.name)) for field in dataclasses.fields(parameters))
    return {field.name: one for field, one in fields if field.name not in unknown or one != field.default}


def recorded_model(model: ModelConfig) -> dict[str, Any]:
    """Return the model's configuration for a digest, without a description that is Llama's, as in the first contexts.

    Parts of a description that were added later are left out if they are empty."""
    fields = dataclasses.asdict(model)
    if model.description == ModelDescription():
        del fields["description"]
    else:
        for name in (name for name, value in model.description.later_parts.items() if not value):
            del fields["description"][name]
    return fields


def _other_turns(program: Program) -> OtherTurns | None:
    if program.parameters.no_turn is not None:
        return None
    other = with_other_turns(program.model, program.parameters, program.state)
    if other == program.state:
        return None
    if len(other) < len(program.state):
        return OtherTurns(
            _state_digest(other),
            "was made by an engine that takes no turns; this one needs the places of its slots in the text for them",
            "make it again: kvc-trt context save, with an engine that takes turns",
        )
    return OtherTurns(
        _state_digest(other),
        "was made by an engine that takes turns, and this one takes none",
        "if this engine is of an earlier version, build it again: "
        "kvc-trt build --config ENGINE_DIR/config.json -o ENGINE_DIR --force",
    )


def _state_digest(state: Sequence[StateTensor]) -> str:
    return digest_of({"state": [dataclasses.asdict(tensor) for tensor in state]})


def context_bytes(
    model: ModelConfig,
    parameters: PolicyParameters,
    state: Sequence[StateTensor],
    cache_lengths: Sequence[int],
    logical_length: int,
) -> int:
    """Return the bytes of a context with these lengths: its tensors and the logits."""
    caches, linear = caches_of(model, parameters, state), linear_of(state)
    return _bytes_of(_layout(caches, linear, cache_lengths, logical_length), model.vocab_size)


def caches_of(model: ModelConfig, parameters: PolicyParameters, state: Sequence[StateTensor]) -> list[Cache]:
    """Return every cache of an engine with its state tensors."""
    return [
        (site, {tensor.name.partition(".")[0]: tensor for tensor in state if tensor.cache == site.cache})
        for site in cache_sites(model, parameters)
    ]


def linear_of(state: Sequence[StateTensor]) -> list[StateTensor]:
    """Return the state of linear layers, which a context holds whole, under its own names."""
    return [tensor for tensor in state if tensor.cache is None]


def _layout(
    caches: Iterable[Cache], linear: Iterable[StateTensor], cache_lengths: Sequence[int], logical_length: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for site, tensors in caches:
        for kind, tensor in _carried(site, tensors).items():
            used = _used(kind, site, tensors, cache_lengths, logical_length)
            heads, slots, *rest = tensor.shape
            found[_name(kind, site)] = (tensor.dtype, (heads, slots if used is None else used, *rest))
    return found | {tensor.name: (tensor.dtype, tensor.shape) for tensor in linear}


def _bytes_of(layout: Mapping[str, tuple[str, tuple[int, ...]]], vocab_size: int) -> int:
    counted = [*layout.values(), ("float32", (vocab_size,))]
    return sum(ITEM_SIZE[dtype] * math.prod(shape) for dtype, shape in counted)


def _used(
    kind: str,
    site: CacheSite,
    tensors: Mapping[str, StateTensor],
    cache_lengths: Sequence[int],
    logical_length: int,
) -> int | None:
    """Return the part of a tensor's second axis that a context holds; None for all of it.

    Tensors by slot are cut to the slots in use, and tensors by position to the text's length. In contexts of `auto`,
    which are older than the other formats, only keys and values are cut to the slots.
    """
    rule = site.parameters
    held = {part.name: part for part in (*parts_in_step(rule), *rule.eviction.turn_state)}
    by = held[kind].shape[2]
    if by == "C" and (kind in SHORT_NAMES or rule.kv_cache != AUTO):
        return _kept(site, tensors, cache_lengths)
    return logical_length if by == "L" else None


def _kept(site: CacheSite, tensors: Mapping[str, StateTensor], cache_lengths: Sequence[int]) -> int:
    """Return the slots in use: a cache that evicts at every step uses all of them once it was full."""
    return min(cache_lengths[site.cache], tensors[K_CACHE.name].shape[1])


def _carried(site: CacheSite, tensors: Mapping[str, StateTensor]) -> dict[str, StateTensor]:
    """Return the tensors of a cache that a context holds, by kind, keys first."""
    return {kind: tensor for kind, tensor in tensors.items() if kind not in site.parameters.selection.rebuilt}


def _name(kind: str, site: CacheSite) -> str:
    return f"{SHORT_NAMES.get(kind, kind)}.{site.cache}"
