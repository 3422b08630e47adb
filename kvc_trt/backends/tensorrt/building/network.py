"""Turn a graph into a checked network: lower it, parse it with mapped weights, count plugins and attention layers.

Weights are mapped from their file and passed to the parser by address: nothing reads them before TensorRT does.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvc_trt.backends.tensorrt.lowering import PLUGINS, check_network, lower_with_notes
from kvc_trt.backends.tensorrt.module import Messages, TensorRT, version_of
from kvc_trt.errors import InputError, UnsupportedEnvironment

if TYPE_CHECKING:
    import tensorrt
    from onnx import ModelProto

    from kvc_trt.files.held import HeldFile


@dataclass
class Network:
    """A parsed network with everything that must live as long as it."""

    builder: tensorrt.Builder
    definition: tensorrt.INetworkDefinition
    lowered: ModelProto
    messages: Messages
    notes: tuple[tuple[str, str], ...]
    kept: list[Any] = field(default_factory=list)


@contextlib.contextmanager
def parsed_network(
    trt: TensorRT, model: ModelProto, weights: HeldFile | None, plugins: frozenset[str] = PLUGINS
) -> Iterator[Network]:
    """Lower, parse and check a graph; `weights` stays mapped while the block runs."""
    done = lower_with_notes(model, tensorrt=version_of(trt), plugins=plugins)
    messages = Messages()
    logger = messages.logger(trt)
    builder = trt.Builder(logger)
    typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    definition = builder.create_network(typed)
    parser = trt.OnnxParser(definition, logger)
    network = Network(builder, definition, done.model, messages, done.notes, [logger, parser])
    with contextlib.ExitStack() as stack:
        if not parser.load_model_proto(done.model.SerializeToString()):
            raise _refused(network, parser, "read")
        _hand_over_weights(network, parser, weights, stack)
        if not parser.parse_model_proto():
            raise _refused(network, parser, "parse")
        check_network(definition, done.model)
        yield network


def external_data(model: ModelProto, file: str | None) -> list[tuple[str, int, int]]:
    """Return (name, offset, bytes) of every initializer, which must be stored in `file`; InputError otherwise."""
    places = []
    for tensor in model.graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if not place:
            continue
        if place["location"] != file:
            raise InputError(f"{tensor.name} is stored in {place['location']}, expected {file or 'it in the graph'}")
        places.append((tensor.name, int(place.get("offset", 0)), int(place["length"])))
    return places


def _hand_over_weights(
    network: Network, parser: tensorrt.OnnxParser, weights: HeldFile | None, stack: contextlib.ExitStack
) -> None:
    places = external_data(network.lowered, None if weights is None else weights.path.name)
    if weights is None or not places:
        return
    data = stack.enter_context(weights.map())
    for name, offset, size in places:
        if offset + size > len(data):
            raise InputError(f"{weights.path} is too short: expected at least {offset + size} bytes, for {name}")
        if not parser.load_initializer(name, _address(data) + offset, size):
            raise _refused(network, parser, f"take the weights {name} of")


def _address(data: mmap.mmap) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def _refused(network: Network, parser: tensorrt.OnnxParser, doing: str) -> UnsupportedEnvironment:
    errors = [str(parser.get_error(index).desc()) for index in range(parser.num_errors)]
    reason = "; ".join(" ".join(error.split()) for error in errors[:3]) or network.messages.reason()
    return UnsupportedEnvironment(
        f"TensorRT's parser cannot {doing} the {network.lowered.graph.name} graph: {reason}",
        hint="kvc-trt doctor shows the TensorRT and the plugin library in use",
    )
