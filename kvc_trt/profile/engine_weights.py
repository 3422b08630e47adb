"""The bytes of an engine's weights, and of those that a decode step reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.graph.weight_plans import EMBEDDING, KEEP, ROTARY
from kvc_trt.models.sources.safetensors_file import SafetensorsFile
from kvc_trt.profile.model_size import WeightBytes, weight_bytes

if TYPE_CHECKING:
    from kvc_trt.engine.program import Program


def engine_weight_bytes(program: Program, weights: str) -> WeightBytes:
    """Return the bytes in the format `weights`, in which a step reads the file; InputError for a broken file.

    They follow from the model's shape, except for kept blocks, whose sizes are those of the GGUF file: these are
    counted in the engine's file.
    """
    if weights != KEEP:
        return weight_bytes(program.model, weights)
    file = SafetensorsFile(program.weight_file)
    file.close()
    sizes = {name: file.entries[name].nbytes for name in file.names() if not name.startswith(ROTARY)}
    resident = sum(sizes.values())
    table = sum(size for name, size in sizes.items() if name.startswith(EMBEDDING))
    return WeightBytes(resident, per_step=resident if program.model.tie_word_embeddings else resident - table)
