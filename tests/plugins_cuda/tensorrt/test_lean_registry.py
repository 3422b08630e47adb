"""The plugin library in a real plugin registry: that of TensorRT's lean runtime, which needs no GPU to register."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvc_trt.operators.registry import KERNEL_OPERATORS
from kvc_trt.operators.schema import VERSION

pytestmark = pytest.mark.tensorrt

GOOD = {
    "KvcCompact": {"prompt_budget": 50, "capacity": 58, "pool_kernel": 7, "page_size": 4, "fp8_bounds": 0},
    "KvcHybridAttention": {
        "page_size": 4,
        "top_r": 6,
        "top_k": 16,
        "token_budget": 32,
        "dense_until": 24,
        "fp8_bounds": 0,
        "recent": 2,
    },
    "KvcDenseAttention": {"dense_until": 32},
}
INTERFACES = [["PLUGIN_V3ONE_CORE", 1, 0], ["PLUGIN_V3ONE_BUILD", 2, 0], ["PLUGIN_V3ONE_RUNTIME", 1, 0]]


@pytest.fixture(params=["emulation", "cuda"])
def plugin_library(request) -> Path:
    """The plugins over the emulated kernels, and the library that an engine loads."""
    if importlib.util.find_spec("tensorrt_lean_bindings") is None:
        pytest.skip("no lean runtime of TensorRT in this Python: pip install '.[tensorrt-lean]'")
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("the lean runtime is not built for AddressSanitizer")
    return request.getfixturevalue("plugins" if request.param == "emulation" else "cuda_plugins")


def ask(library: Path, *requests) -> dict:
    program = Path(__file__).with_name("lean_registry.py")
    done = subprocess.run(
        [sys.executable, program, library, json.dumps(requests)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"ended with {done.returncode}:\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def request_of(operator: str, *, phase: str = "build", **changes) -> dict:
    """Good fields with `changes`: name=(dtype, values), or None to leave it out."""
    fields = {name: ("int32", [value]) for name, value in GOOD[operator].items()} | changes
    return {
        "operator": operator,
        "phase": phase,
        "fields": [[name, *field] for name, field in fields.items() if field is not None],
    }


def test_the_library_registers_its_creators_and_leaves_nothing_behind(plugin_library):
    answer = ask(plugin_library)
    assert answer["loaded"]
    expected = {
        one.name: [VERSION, [[attribute.name, "INT32"] for attribute in one.call_attributes]]
        for one in KERNEL_OPERATORS
    }
    assert answer["creators"] == expected
    assert not answer["loaded_twice"]
    assert answer["left"] == []


def test_good_fields_make_plugins_in_both_phases(plugin_library):
    requests = [request_of(operator, phase=phase) for operator in GOOD for phase in ("build", "runtime")]
    assert ask(plugin_library, *requests)["created"] == [{"created": True, "interfaces": INTERFACES}] * 6


def test_bad_fields_make_none_and_say_why(plugin_library):
    refused = [
        ("KvcCompact", {"capacity": None}, "field capacity: missing"),
        ("KvcCompact", {"pool_kernel": ("int32", [8])}, "field pool_kernel: expected an odd number, found 8"),
        ("KvcCompact", {"prompt_budget": ("int32", [59])}, "field prompt_budget: expected at most the capacity of 58"),
        ("KvcHybridAttention", {"page_size": ("int32", [0])}, "field page_size: expected 1..2147483647, found 0"),
        ("KvcHybridAttention", {"top_k": ("int32", [1, 2])}, "field top_k: expected one INT32"),
        ("KvcHybridAttention", {"top_k": ("int32", [])}, "field top_k: expected one INT32"),
        ("KvcHybridAttention", {"top_r": ("float32", [6.0])}, "field top_r: expected one INT32"),
        ("KvcHybridAttention", {"top_r": ("int64", [6])}, "field top_r: expected one INT32"),
        ("KvcHybridAttention", {"top_r": None, "topr": ("int32", [6])}, "field topr: unknown"),
        ("KvcDenseAttention", {"page_size": ("int32", [4])}, "field page_size: unknown"),
        ("KvcDenseAttention", {"dense_until": ("int32", [-1])}, "field dense_until: expected 0..2147483647, found -1"),
    ]
    answers = ask(plugin_library, *(request_of(operator, **changes) for operator, changes, _ in refused))["created"]
    for (operator, _, reason), answer in zip(refused, answers, strict=True):
        assert not answer["created"]
        assert answer["reason"].startswith(f"kvc plugin: {operator}: {reason}")


def test_a_library_without_creators_is_not_loaded(plugin_library, emulation):
    """A runtime has to check for such a library: the registry answers nothing instead of an error."""
    del plugin_library
    assert not ask(emulation.path)["loaded"]
