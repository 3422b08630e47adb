"""The order of a prefill: a layer is compacted before the next one attends, so that one full cache is alive."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.engine.program import Program
from kvc_trt.graph.build import build_decode, build_prefill
from kvc_trt.graph.state import state_tensors
from kvc_trt.graph.weights import GraphWeights


def compressing_every_layer(engine):
    model, parameters = engine.model, replace(engine.parameters, skip_layers=0)
    weights = GraphWeights(engine.weight_file)
    return Program(
        model,
        parameters,
        state_tensors(model, parameters, weights.dtype),
        engine.weight_file,
        lambda: build_prefill(model, parameters, weights=weights),
        lambda: build_decode(model, parameters, weights=weights),
    )


def test_each_layer_is_compacted_before_the_next_attends(rocketkv, tmp_path):
    executor = OnnxRuntimeExecutor(compressing_every_layer(rocketkv), RunOptions(threads=1), profile=tmp_path)
    executor.prefill(np.full((1, 256), 5, np.int64), np.array([240]))
    events = json.loads(executor.end_profiling()["prefill"].read_text())
    nodes = sorted((event for event in events if event.get("cat") == "Node"), key=lambda event: event["ts"])
    names = [node["name"] for node in nodes]
    attends = [i for i, name in enumerate(names) if "KvcPrefillAttention" in name and "Loop" in name]
    gathers = [i for i, name in enumerate(names) if "KvcCompact" in name and "GatherND" in name]
    assert len(attends) == rocketkv.model.num_hidden_layers == 3
    per_layer = len(gathers) // len(attends)
    for layer, attention in enumerate(attends):
        assert sum(place < attention for place in gathers) >= layer * per_layer > 0 or layer == 0
