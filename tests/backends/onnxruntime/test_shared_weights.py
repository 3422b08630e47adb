"""Sessions that share a mapping read the same weights as ONNX Runtime does when it maps the file itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from kvc_trt.backends.onnxruntime import loading
from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.onnxruntime.loading import LoadOptions, load_graph
from kvc_trt.backends.onnxruntime.shared_weights import SharedWeights
from kvc_trt.backends.run_options import RunOptions
from tests.small_programs import copied

MAPS = Path("/proc/self/maps")


@pytest.mark.skipif(not MAPS.exists(), reason="needs /proc/self/maps, which Linux has")
def test_prefill_and_decode_read_one_mapping(make_program, monkeypatch, tmp_path):
    """Uses files of its own: executors left by other tests may still map the shared ones."""
    monkeypatch.setattr("kvc_trt.backends.onnxruntime.packed_copies.PREPACK_UP_TO_BYTES", 0)
    program = copied(make_program("rocketkv, a skipped layer"), tmp_path)
    executor = OnnxRuntimeExecutor(program, RunOptions(threads=1))
    executor.load()
    assert MAPS.read_text(encoding="utf-8").count(str(program.weight_file.path)) == 1


def test_results_are_those_of_a_session_that_maps_the_file_itself(rocketkv):
    ids = np.random.default_rng(0).integers(2, 97, (1, 128))
    options = LoadOptions(1, prepack=False, by_bodies=True, weights=SharedWeights(rocketkv.weight_file))
    alone = loading._session_options(options)
    folder = str(rocketkv.weight_file.path.parent)
    alone.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    graph = loading.prepared_graph(rocketkv.prefill, options).SerializeToString()
    sessions = load_graph(rocketkv.prefill, options), onnxruntime.InferenceSession(graph, alone)
    given = {"input_ids": ids, "prompt_lengths": np.array([128])}
    np.testing.assert_array_equal(*(session.run(["logits"], given)[0] for session in sessions))
