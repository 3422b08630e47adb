"""Find in a graph the exact keys and values that it stores in each cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kvc_trt.backends.harness import StoredBlock
from kvc_trt.methods.base.by_row import kept_name
from kvc_trt.methods.base.graph_context import of_token
from kvc_trt.methods.base.registry import operators
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.compaction.store_tokens import STORE_TOKENS

if TYPE_CHECKING:
    from onnx import NodeProto

    from kvc_trt.graph.state import CacheSite

_NEW, _OF_PROMPT = ("k_new", "v_new"), ("k", "v")


def stored_blocks(
    nodes: Iterable[NodeProto], sites: Iterable[CacheSite], cache: str, token: int = 0, tokens: int = 1
) -> list[StoredBlock]:
    """Return the blocks that a graph's operators store in caches with a format; none for other caches.

    `cache` is the name of the graph's output with the keys: k_cache for prefill, k_cache_out for other graphs. For a
    graph that feeds several `tokens` per row, return the blocks of one of them.
    """
    by_output = {name: node for node in nodes for name in node.output}
    found = []
    for site in sites:
        if site.parameters.cache_format.keys is None:
            continue
        node, names = _exact_inputs(by_output, of_token(f"{cache}.{site.name}", token, tokens), site)
        untrimmed = kept_name("slot_positions", site.name)
        positions = untrimmed if untrimmed in by_output else f"indices.{site.name}"
        chosen = node.op_type == STORE_TOKENS.name and positions in by_output
        found.append(StoredBlock(site.cache, *names, positions if chosen else None))
    return found


def _exact_inputs(by_output: Mapping[str, NodeProto], name: str, site: CacheSite) -> tuple[NodeProto, tuple[str, str]]:
    """Return the node that stores the vectors in a value, and the names of the exact keys and values it stores."""
    node = by_output[name]
    while True:
        assert node.domain == KVC_DOMAIN, f"{node.op_type} stores no keys"
        schema = operators()[node.op_type]
        names = (one.name for one in schema.for_numbers({one.name: one.i for one in node.attribute}).inputs)
        given = dict(zip(names, node.input, strict=True))
        exact = {one.name for one in schema.inputs if one.stored is None}
        for keys, values in (_NEW, _OF_PROMPT):
            if keys in exact:
                return node, (given[keys], given[values])
        node = by_output[next(given[one.name] for one in schema.inputs if one.stored == "keys")]
