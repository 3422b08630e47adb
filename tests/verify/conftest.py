"""Small engines with random weights, honest ones and mutated ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import onnx
import pytest

from kvc_trt import Engine, build
from kvc_trt.config import BuildConfig
from kvc_trt.engine import EngineDirectory
from kvc_trt.engine.configuration import EngineConfig
from kvc_trt.engine.manifest import CheckpointRecord, FileRecord, Manifest
from kvc_trt.files.held import HeldFile
from kvc_trt.graph.build import build_decode, build_draft, build_extend, build_prefill
from kvc_trt.graph.weights import GraphWeights, write_weights
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.policies import PolicyParameters
from tests.every_policy import parameters_of
from tests.models.gguf.tiny import write
from tests.small_model import SMALL

MODEL = dataclasses.replace(SMALL, num_hidden_layers=2, eos_token_ids=())


@pytest.fixture(scope="session")
def proving(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    """`proving(policy, weights)`: an engine that writes proofs, built and opened once; tests leave it as it is.

    With weights `keep`, its model is a GGUF file.
    """
    kept = write(tmp_path_factory.mktemp("gguf") / "model.gguf", kind="Q4_1")

    @cache
    def made(policy: str = "rocketkv", weights: str = "fp32", kv_cache: str = "auto") -> Engine:
        given: dict[str, Any] = {"checkpoint": None} if weights == "keep" else {"random_weights": 0}
        given |= {"token_budget": 96 if policy == "snapkv" else 64, "max_input_len": 256, "max_output_len": 32}
        if policy == "quest":  # by its own rule it reads all of the first two layers, and there are no others
            given["skip_layers"] = 0
        model, path = kept if weights == "keep" else tiny_model, tmp_path_factory.mktemp("proving") / "engine"
        given |= {} if kv_cache == "auto" else {"kv_cache": kv_cache}
        build(str(model), policy=policy, weights=weights, output=path, verify=False, **given)
        return Engine.open(path, proofs=True, threads=1)

    return made


@pytest.fixture
def parameters_for() -> Callable[..., PolicyParameters]:
    """`parameters_for(name, **changes)`: those of a name of `tests.every_policy` for the model of these tests."""

    def resolve(name: str = "rocketkv", **changes: Any) -> PolicyParameters:
        return parameters_of(name, MODEL, **{"max_output_len": 32, **changes})

    return resolve


@pytest.fixture
def make_engine(tmp_path: Path) -> Callable[..., EngineDirectory]:
    """`make_engine(claimed, built=None, edit=None)`: an engine that claims `claimed`; its graphs follow `built`.

    `edit(name, model)` may change the graphs before they are saved. With `turns` there is an extend graph, and a draft
    graph for drafts of `drafts` tokens.
    """

    def make(
        claimed: PolicyParameters,
        built: PolicyParameters | None = None,
        edit: Callable[[str, onnx.ModelProto], None] | None = None,
        model: ModelConfig = MODEL,
        weights: str = "fp32",
        turns: bool = False,
        drafts: int = 0,
        all_logits: bool = False,
    ) -> EngineDirectory:
        path = tmp_path / "engine"
        path.mkdir(exist_ok=True)
        length = claimed.max_sequence_len
        write_weights(model, RandomWeights(model, 0), path / "weights.safetensors", weights=weights, length=length)
        stored = GraphWeights(path / "weights.safetensors")
        graphs: dict[str, Callable[..., Any]] = {"prefill": partial(build_prefill, turns=turns), "decode": build_decode}
        if turns:
            graphs["extend"] = partial(build_extend, all_logits=all_logits)
        if drafts:
            graphs["draft"] = partial(build_draft, tokens=1 + drafts)
        for name, build_graph in graphs.items():
            graph = build_graph(model, built or claimed, weights=stored)
            if edit is not None:
                edit(name, graph)
            onnx.save(graph, path / f"{name}.onnx")
        settings: dict[str, Any] = {
            "model": "test", "policy": claimed.policy, "backend": "onnxruntime", "weights": weights
        }  # fmt: skip
        if drafts:
            settings["draft_tokens"] = drafts
        if all_logits:
            settings["all_logits"] = True
        config = EngineConfig(dataclasses.replace(model, dtype=stored.dtype), claimed, BuildConfig(**settings), turns)
        manifest = Manifest.model_construct(
            files={f"{name}.onnx": FileRecord("", 0) for name in ("extend", "draft") if name in graphs},
            checkpoint=CheckpointRecord(source="random", commit=None, fingerprint="0" * 64),
        )
        held = {file.name: HeldFile(file) for file in path.iterdir()}
        return EngineDirectory(path, config, manifest, held)

    return make
