"""TensorRT-LLM's engine directory: config.json {version, pretrained_config, build_config} and rank0.engine.

It holds one plan, and our engines have two, so there are two directories, as TensorRT-LLM has for encoder and decoder:
DIR/prefill and DIR/decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvc_trt.backends.tensorrt.building.profiles import prefill_profiles
from kvc_trt.backends.tensorrt.format import plan_file
from kvc_trt.engine import EngineDirectory
from kvc_trt.engine.manifest import canonical
from kvc_trt.engine.writer import new_directory, place, writable_target
from kvc_trt.errors import InputError
from kvc_trt.files.atomic import write_durably
from kvc_trt.files.held import HeldFile

PHASES = ("prefill", "decode")
CONFIG_FILE, PLAN_FILE = "config.json", "rank0.engine"


def directory_config(engine_config: Mapping[str, Any], version: str, max_num_tokens: int) -> dict[str, Any]:
    """Return TensorRT-LLM's config.json, made from that of our engine; `version` is the tensorrt_llm that built it.

    build_config gets the keys that its reader requires; the compression is an extra key.
    """
    ours = {name: value for name, value in engine_config["build_config"].items() if name != "kvc_trt"}
    build = {
        "max_num_tokens": max_num_tokens,
        "opt_num_tokens": None,
        "max_prompt_embedding_table_size": 0,
        "force_num_profiles": None,
        "profiling_verbosity": "detailed",
        "use_refit": False,
        "weight_sparsity": False,
        "weight_streaming": False,
        "use_strip_plan": False,
        **ours,
        "kv_compression": engine_config["kv_compression"],
    }
    return {"version": version, "pretrained_config": engine_config["pretrained_config"], "build_config": build}


def export_engine(engine: EngineDirectory, target: Path) -> None:
    """Write a checked engine of backend tensorrt-llm in TensorRT-LLM's layout; InputError for any other engine."""
    if engine.backend != "tensorrt-llm":
        raise InputError(
            f"{engine.path} was built for {engine.backend}, expected tensorrt-llm",
            hint="kvc-trt build --backend tensorrt-llm, or kvc-trt export llm-api for TensorRT-LLM's own RocketKV",
        )
    rows = engine.build.max_batch_size
    prefill = prefill_profiles(engine.parameters.max_input_len, rows)
    tokens = {"prefill": max(profile.largest_tokens for profile in prefill), "decode": rows}
    version = engine.manifest.target["tensorrt_llm"]
    configs = {phase: directory_config(engine.config.to_json(), version, tokens[phase]) for phase in PHASES}
    write_engine_directories(target, configs, {phase: engine.held[plan_file(phase)] for phase in PHASES})


def write_engine_directories(
    target: Path, configs: Mapping[str, Mapping[str, Any]], plans: Mapping[str, HeldFile]
) -> None:
    """Write target/prefill and target/decode atomically; plans are linked, or copied between file systems.

    Raises InputError if `target` exists.
    """
    target = writable_target(target)
    if target.exists() or target.is_symlink():
        raise InputError(f"{target} exists and is not replaced", hint="another -o DIRECTORY")
    with new_directory(target) as directory:
        for phase in PHASES:
            (directory / phase).mkdir()
            write_durably(directory / phase / CONFIG_FILE, canonical(configs[phase]))
            place(plans[phase], directory / phase / PLAN_FILE)
