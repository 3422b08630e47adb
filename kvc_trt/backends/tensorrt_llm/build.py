"""The stages of an engine that TensorRT-LLM's builder makes: two plans, like those of the tensorrt backend.

Not executed anywhere yet: docs/tensorrt-llm.md says what was checked and what was not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from kvc_trt.backends.tensorrt_llm.layers import Layers
from kvc_trt.backends.tensorrt_llm.loading import load_builder_api, plugin_library
from kvc_trt.backends.tensorrt_llm.networks import define_decode, define_prefill
from kvc_trt.backends.tensorrt_llm.plugins import load_plugins
from kvc_trt.backends.tensorrt_llm.protocol import BuilderApi
from kvc_trt.engine.build import Makers
from kvc_trt.engine.model_choice import ModelSource
from kvc_trt.engine.request import Request
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.progress import Progress

STAGES = {"prefill": "prefill.engine", "decode": "decode.engine"}
WEIGHTS = ("fp32", "fp16", "bf16")


def makers(request: Request, source: ModelSource, progress: Progress) -> Makers:
    """Return what makes each stage's file; TensorRT-LLM is imported when the first plan is made."""
    if request.config.weights not in WEIGHTS:
        raise InputError(
            f"backend tensorrt-llm takes weights {', '.join(WEIGHTS)}, found {request.config.weights}",
            hint="--backend onnxruntime runs int8 and int4",
        )
    parameters, batch = request.parameters, request.config.max_batch_size

    @cache
    def api() -> BuilderApi:
        library, loaded = plugin_library(), load_builder_api()
        load_plugins(loaded, library)
        return loaded

    def layers() -> Layers:
        return Layers(api(), request.model, source.weights, parameters.max_sequence_len)

    def prefill(path: Path, *, finished: Path) -> None:
        with progress.task("building the prefill engine", None):
            _write_plan(path, api(), request.dtype, lambda: define_prefill(layers(), parameters, batch))

    def decode(path: Path, *, finished: Path) -> None:
        from kvc_trt.graph.build import slice_limit

        until = slice_limit(parameters)
        with progress.task("building the decode engine", None):
            _write_plan(path, api(), request.dtype, lambda: define_decode(layers(), parameters, batch, until))

    return {"prefill": prefill, "decode": decode}


def build_plan(api: BuilderApi, dtype: str, define: Callable[[], None]) -> Any:
    """Build the network that `define` adds layers to; the plan is a buffer.

    Raises UnsupportedEnvironment where TensorRT refuses it: what it said stands in its log, above.
    """
    builder = api.make_builder()
    network = builder.create_network()
    with api.net_guard(network):
        define()
    config = builder.create_builder_config(dtype, strongly_typed=True, profiling_verbosity="detailed")
    # Without this flag TensorRT refuses plugins that write their cache in place.
    config.trt_builder_config.set_preview_feature(api.tensorrt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    try:
        return builder.build_engine(network, config)
    except AssertionError as error:
        raise UnsupportedEnvironment(
            f"TensorRT-LLM {api.version} could not build the engine: {error}", hint="TensorRT's reason stands above"
        ) from error


def _write_plan(path: Path, api: BuilderApi, dtype: str, define: Callable[[], None]) -> None:
    with path.open("wb") as file:
        file.write(build_plan(api, dtype, define))
