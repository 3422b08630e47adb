"""The benchmark of decode steps follows the operators' schemas: what it measures alone is built and runs."""

from benchmarks.decode.onnxruntime_steps import attention_alone


def test_attention_alone_is_measured_with_and_without_a_policy(tmp_path):
    measured = attention_alone(1024, 1, 0.01, tmp_path)
    assert {"rocketkv", "full", "bare_matmul"} <= set(measured)
