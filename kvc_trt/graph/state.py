"""The state tensors of an engine; runtimes allocate and bind from this list alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvc_trt.methods.base.graph_context import of_token
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.cache_formats import INT4
from kvc_trt.models.config import ModelConfig
from kvc_trt.operators.fp8_bounds import EMPTY
from kvc_trt.operators.linear.tokens import LAST_INPUTS, MEMORY
from kvc_trt.operators.linear.tokens import STATE as LINEAR_STATE
from kvc_trt.operators.schema import BOUND, CACHE, FLOAT, FLOAT16, INT8, INT32, Tensor, parts_of
from kvc_trt.operators.shapes import LOWEST
from kvc_trt.operators.tensors import K_CACHE, V_CACHE, updated

Dtype = Literal["float32", "float16", "bfloat16"]

ITEM_SIZE: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int8": 1}


@dataclass(frozen=True)
class StateTensor:
    """One tensor of an engine's state: an input of a graph that shares a buffer with an output."""

    layer: int
    cache: int | None
    """Row of `cache_lengths` that counts the entries of this tensor's cache; None for the state of a linear layer."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    """Shape without the batch dimension, which comes first: [G,C,D] (per query head [H,C,D]) for keys and values; the
    cache's decode selection, or the operators of linear layers, define the other shapes."""
    fill: float
    """Value of an empty slot or page."""
    aliased_output: str
    in_step: bool = True
    """True if a decode step reads and writes it; others pass from the prefill graph to the extend graph."""

    def outputs(self, tokens: int) -> tuple[str, ...]:
        """Return the names under which a graph that feeds `tokens` tokens per row writes it, one after each token.

        An executor binds its one buffer to all of them."""
        return tuple(of_token(self.aliased_output, token, tokens) for token in range(tokens))

    def bytes_per_row(self) -> int:
        """The size of one row of the batch in bytes."""
        count = ITEM_SIZE[self.dtype]
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class CacheSite:
    """One cache of an engine: KV heads of a layer that are stored alike, and the row that counts their entries."""

    layer: int
    cache: int
    name: str
    """Suffix of its tensors' names: the layer, and the group if the layer has several ("3", "3.1")."""
    kv_heads: tuple[int, ...] | None
    """The KV heads of the layer that it stores; None for all."""
    parameters: PolicyParameters
    """The policy parameters of this cache."""


def cache_sites(config: ModelConfig, parameters: PolicyParameters) -> tuple[CacheSite, ...]:
    """Return every cache of an engine, in the order of the rows of `cache_lengths`; linear layers have none."""
    sites: list[CacheSite] = []
    for layer in range(config.num_hidden_layers):
        groups = parameters.groups(layer)
        for number, group in enumerate(groups):
            name = str(layer) if len(groups) == 1 else f"{layer}.{number}"
            sites.append(CacheSite(layer, len(sites), name, *group))
    return tuple(sites)


def by_layer(config: ModelConfig, sites: Sequence[CacheSite]) -> Iterator[tuple[int, list[CacheSite]]]:
    """Yield each layer with its caches; a linear layer has none."""
    for layer in range(config.num_hidden_layers):
        yield layer, [site for site in sites if site.layer == layer]


def parts_in_step(rule: PolicyParameters) -> list[Tensor]:
    """Return the tensors of a cache that a decode step reads and writes: keys and values first, each in the parts of
    its format."""
    held = (K_CACHE, V_CACHE, *rule.selection.state)
    return [part for tensor in held for part in parts_of(tensor, rule.cache_format)]


def with_other_turns(
    config: ModelConfig, parameters: PolicyParameters, state: Sequence[StateTensor]
) -> tuple[StateTensor, ...]:
    """Return the state of the engine that takes turns where that of `state` does not, or the other way round.

    The tensors that only turns need are never of the activations' type.
    """
    of_steps = {tensor.name: tensor for tensor in state if tensor.in_step}
    if len(of_steps) < len(state):
        return tuple(of_steps.values())
    with_turns = state_tensors(config, parameters, "float32", turns=True)
    return tuple(of_steps.get(tensor.name, tensor) for tensor in with_turns)


def uses_pages(parameters: PolicyParameters, layer: int) -> bool:
    """True if a layer selects tokens by page when it decodes, and so keeps page bounds."""
    return any(group.parameters.has_pages for group in parameters.groups(layer))


def state_tensors(
    config: ModelConfig, parameters: PolicyParameters, dtype: str, *, turns: bool = False
) -> tuple[StateTensor, ...]:
    """Return every state tensor of a decode graph, in the graph's order; with `turns`, those of an extend graph.

    Those of caches come first, and then those of linear layers."""
    if dtype not in LOWEST:
        raise ValueError(f"dtype: expected one of {', '.join(LOWEST)}, found {dtype!r}")
    sites = cache_sites(config, parameters)
    of_caches = [tensor for site in sites for tensor in _tensors(config, site, dtype, turns=turns)]
    return (*of_caches, *linear_state(config, dtype))


def linear_state(config: ModelConfig, dtype: str) -> Iterator[StateTensor]:
    """Yield the state of every linear layer, whose size no token changes."""
    for layer in config.linear_layers:
        part = config.attention(layer).linear
        assert part is not None, "it is linear"
        shapes = {
            LAST_INPUTS.name: (part.kernel - 1, part.channels),
            MEMORY.name: (part.value_heads, part.key_size, part.value_size),
        }
        for one in LINEAR_STATE:
            own = "float32" if one.element == FLOAT else dtype
            name, output = f"{one.name}.{layer}", f"{updated(one).name}.{layer}"
            yield StateTensor(layer, None, name, own, shapes[one.name], 0.0, output)


def _tensors(config: ModelConfig, site: CacheSite, dtype: str, *, turns: bool) -> Iterator[StateTensor]:
    rule, size, heads = site.parameters, config.head_size, cache_heads(config, site)
    sizes = {"G": heads, "C": rule.capacity, "D": size, "2D": 2 * size, "P": rule.stored_pages(dtype)}
    sizes |= {"L": rule.max_sequence_len, "1": 1, "D/2": size // 2, "groups": INT4.groups(size)}
    in_step = parts_in_step(rule)
    for part in (*in_step, *(rule.eviction.turn_state if turns else ())):
        name, output = f"{part.name}.{site.name}", f"{part.name}_out.{site.name}"
        own = _dtype_of(part, rule, dtype)
        shape = tuple(sizes[symbol] for symbol in part.shape[1:])
        fill = _lowest(own) if part.fill == "lowest" else part.fill
        yield StateTensor(site.layer, site.cache, name, own, shape, fill, output, part in in_step)


def _dtype_of(tensor: Tensor, rule: PolicyParameters, dtype: str) -> str:
    if tensor.element == BOUND:
        return "int8" if rule.fp8_bounds else dtype
    return {CACHE: dtype, FLOAT: "float32", FLOAT16: "float16", INT32: "int32", INT8: "int8"}[tensor.element]


def _lowest(dtype: str) -> float:
    """Return the value of an empty page's bounds."""
    return float(EMPTY) if dtype == "int8" else LOWEST[dtype]


def cache_heads(config: ModelConfig, site: CacheSite) -> int:
    """Return the number of heads that a cache stores: all query heads if each of them evicts separately."""
    kv_heads = config.num_key_value_heads if site.kv_heads is None else len(site.kv_heads)
    return kv_heads * config.group_size if site.parameters.eviction.cache_per_query_head else kv_heads
