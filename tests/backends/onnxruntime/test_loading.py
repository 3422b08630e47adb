from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from kvc_trt.backends.onnxruntime import loading
from kvc_trt.backends.onnxruntime.loading import LoadOptions, load_graph, run_bound
from kvc_trt.backends.onnxruntime.native import VARIABLE, NativeOperators
from kvc_trt.errors import UnsupportedEnvironment


def binding_of(shape):
    """Return a graph that makes a tensor of zeros of the given shape, bound and ready to run."""
    node = helper.make_node("ConstantOfShape", ["shape"], ["zeros"])
    inputs = [helper.make_tensor_value_info("shape", TensorProto.INT64, [2])]
    outputs = [helper.make_tensor_value_info("zeros", TensorProto.FLOAT, ["rows", "columns"])]
    graph = helper.make_graph([node], "zeros", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    binding.bind_cpu_input("shape", np.array(shape))
    binding.bind_output("zeros", "cpu")
    return session, binding


def test_a_run_beyond_memory_is_a_clear_error():
    with pytest.raises(UnsupportedEnvironment, match="too little memory"):
        run_bound(*binding_of([1 << 22, 1 << 22]))


def test_an_ordinary_run_error_is_not_reported_as_missing_memory():
    with pytest.raises(Exception, match="ONNXRuntimeError") as caught:
        run_bound(*binding_of([-1, 2]))
    assert not isinstance(caught.value, UnsupportedEnvironment)


def test_operators_that_onnx_runtime_refuses_are_a_clear_error(rocketkv, library, monkeypatch):
    def refuse(self, options):
        raise RuntimeError("kvc: needs ONNX Runtime 1.17 or newer")

    monkeypatch.setenv(VARIABLE, str(library))
    monkeypatch.setattr(NativeOperators, "register", refuse)
    with pytest.raises(UnsupportedEnvironment, match=r"cannot load .*: kvc: needs ONNX Runtime 1\.17 or newer"):
        load_graph(rocketkv.decode, LoadOptions(1, prepack=False))


AFTER_A_RUN = """
import time
import numpy as np
from onnx import TensorProto, helper
from kvc_trt.backends.onnxruntime.loading import LoadOptions, load_graph

inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [512, 512]) for name in ("left", "right")]
outputs = [helper.make_tensor_value_info("product", TensorProto.FLOAT, [512, 512])]
graph = helper.make_graph([helper.make_node("MatMul", ["left", "right"], ["product"])], "product", inputs, outputs)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
session = load_graph(lambda: model, LoadOptions(4, prepack=False))
session.run(None, {name: np.ones((512, 512), np.float32) for name in ("left", "right")})
before = time.process_time()
time.sleep(0.05)
print(time.process_time() - before)
"""


def test_threads_do_not_wait_actively_after_a_run():
    """Runs in a process of its own: other processes can only reduce its processor time."""
    environment = {name: value for name, value in os.environ.items() if name != loading.WAIT_POLICY}
    command = [sys.executable, "-c", AFTER_A_RUN]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert float(done.stdout) < 0.005


@pytest.mark.parametrize(("policy", "waits_actively"), [(None, True), ("active", True), ("PASSIVE", False)])
def test_threads_sleep_while_they_wait_where_the_environment_says_so(policy, waits_actively, monkeypatch):
    monkeypatch.delenv(loading.WAIT_POLICY)
    if policy is not None:
        monkeypatch.setenv(loading.WAIT_POLICY, policy)
    options = loading._session_options(LoadOptions(2, prepack=True))
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == str(int(waits_actively))
