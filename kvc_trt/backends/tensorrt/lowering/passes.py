"""The passes in order, and functions to run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnx import ModelProto

from kvc_trt.backends.tensorrt.lowering.attention import fuse_prefill_attention, let_fp32_attention_decompose
from kvc_trt.backends.tensorrt.lowering.operators import (
    TensorRtInstallation,
    check_operators,
    drop_functions,
    name_plugins,
)
from kvc_trt.backends.tensorrt.lowering.outputs import add_best_token, fix_output_shapes
from kvc_trt.backends.tensorrt.lowering.prompts import store_prompts
from kvc_trt.backends.tensorrt.lowering.state import hand_on_state, overwrite_state
from kvc_trt.backends.tensorrt.lowering.turns import mask_turn_attention, write_out_positions
from kvc_trt.backends.tensorrt.lowering.widths import write_out_widths

Pass = Callable[[ModelProto, TensorRtInstallation], list[str]]
"""Changes the model in place and returns one line per kind of change."""

EXECUTABLE_PASSES: tuple[Pass, ...] = (
    check_operators,
    write_out_widths,
    fix_output_shapes,
    fuse_prefill_attention,
    mask_turn_attention,
    write_out_positions,
    overwrite_state,
    add_best_token,
)
"""Passes after which ONNX Runtime can still execute the graph."""

PASSES: tuple[Pass, ...] = (
    *EXECUTABLE_PASSES,
    store_prompts,
    hand_on_state,
    let_fp32_attention_decompose,
    name_plugins,
    drop_functions,
)
"""All passes, run on every graph. After the last five only NVIDIA's parser reads it."""


@dataclass(frozen=True)
class Lowered:
    """A lowered graph, and the notes of the passes."""

    model: ModelProto
    notes: tuple[tuple[str, str], ...]
    """(pass, its note)"""


def lower(model: ModelProto, *, tensorrt: tuple[int, int], plugins: frozenset[str]) -> ModelProto:
    """Return the graph for NVIDIA's parser of this version; `model` and its weights are not changed.

    `plugins` are the operators in the registry. Raises InputError for a graph that no TensorRT runs, and
    UnsupportedEnvironment for a TensorRT that is too old or a missing plugin.
    """
    return lower_with_notes(model, tensorrt=tensorrt, plugins=plugins).model


def lower_with_notes(model: ModelProto, *, tensorrt: tuple[int, int], plugins: frozenset[str]) -> Lowered:
    """Like `lower`, but also return a note on each pass, for a build's log."""
    copy = ModelProto()
    copy.CopyFrom(model)
    at_hand = TensorRtInstallation(tensorrt, plugins)
    notes = [(step.__name__, note) for step in PASSES for note in step(copy, at_hand)]
    return Lowered(copy, tuple(notes))
