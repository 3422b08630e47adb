"""The ways in which a machine does not fit an engine: for each the message, and the remedy in it.

The tests give facts and compare messages; nothing stands in for TensorRT or a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvc_trt.backends.tensorrt.building.profiles import choose_profile, decode_profiles, prefill_profiles
from kvc_trt.backends.tensorrt.device import DeviceOutOfMemory, failure
from kvc_trt.backends.tensorrt.machine import Gpu, GpuMachine
from kvc_trt.backends.tensorrt.plugins import PluginLibrary
from kvc_trt.backends.tensorrt.requirements import BuiltFor, describe, library_of, missing_for, missing_here, refuse
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.kernels.structs import ABI_VERSION

REBUILD = "rebuild it: kvc-trt build --config engine/config.json -o engine --force"
SHA256, OTHER = "ab" * 32, "cd" * 32
WANTED = f"expected one for CUDA with ABI {ABI_VERSION}"
PLUGINS = PluginLibrary("plugins", Path("/opt/libkvc_plugins.so"), SHA256, ABI_VERSION, "cuda")
H200 = Gpu("NVIDIA H200", (9, 0), 150_754_820_096, 149_000_000_000)
GOOD = GpuMachine("11.4.0.106", None, (13, 0), None, (13, 0), H200, None, (PLUGINS,))
MANIFEST = {
    "target": {
        "backend": "tensorrt",
        "architecture": "sm_90",
        "tensorrt": "11.4.0.106",
        "plugins": {"file": "libkvc_plugins.so", "sha256": SHA256, "abi": ABI_VERSION},
        "compatibility": "none",
    }
}
TARGET = BuiltFor.of(MANIFEST["target"], "engine")

MACHINES = {
    "TensorRT absent": (
        replace(GOOD, tensorrt=None, tensorrt_problem="not installed"),
        "TensorRT: expected 10.15 or newer, found not installed",
        "pip install 'kvc-trt[tensorrt]'",
    ),
    "TensorRT broken": (
        replace(GOOD, tensorrt=None, tensorrt_problem="11.4 is installed, but does not load: libnvinfer.so.11"),
        "TensorRT: expected 10.15 or newer, found 11.4 is installed, but does not load: libnvinfer.so.11",
        "pip install 'kvc-trt[tensorrt]'",
    ),
    "TensorRT too old": (
        replace(GOOD, tensorrt="10.14.1.48"),
        "TensorRT: expected 10.15 or newer, found 10.14.1.48",
        "pip install 'kvc-trt[tensorrt]' --upgrade",
    ),
    "no cuda-bindings": (
        replace(GOOD, cuda_runtime=None, cuda_problem="not installed", gpu=None),
        "cuda-bindings: expected an installed package, found not installed",
        "pip install 'kvc-trt[tensorrt]'",
    ),
    "driver absent": (
        replace(GOOD, driver=None, gpu=None),
        "NVIDIA driver: expected one for CUDA 13, found none",
        "install NVIDIA's driver; then nvidia-smi",
    ),
    "driver too old": (
        replace(GOOD, driver=(12, 8)),
        "NVIDIA driver: expected one for CUDA 13, found one for CUDA 12.8",
        "update NVIDIA's driver, or install the packages for CUDA 12",
    ),
    "no GPU": (
        replace(GOOD, gpu=None, gpu_problem="CUDA, asking for the device: cudaErrorNoDevice (100)"),
        "NVIDIA GPU: expected sm_80 or newer, found CUDA, asking for the device: cudaErrorNoDevice (100)",
        "nvidia-smi",
    ),
    "GPU too old": (
        replace(GOOD, gpu=Gpu("Tesla T4", (7, 5), 16 << 30, 15 << 30)),
        "NVIDIA GPU: expected sm_80 or newer, found sm_75 (Tesla T4)",
        "--backend onnxruntime runs on any CPU",
    ),
    "no plugin library": (
        replace(GOOD, libraries=()),
        f"plugin library: {WANTED}, found none",
        "make plugins",
    ),
    "plugin library of another version": (
        replace(GOOD, libraries=(replace(PLUGINS, abi=7),)),
        f"plugin library: {WANTED}, found /opt/libkvc_plugins.so (cuda, ABI 7)",
        "make plugins",
    ),
    "emulated kernels": (
        replace(GOOD, libraries=(replace(PLUGINS, executor="emulation"),)),
        f"plugin library: {WANTED}, found /opt/libkvc_plugins.so (emulation, ABI {ABI_VERSION})",
        "make plugins",
    ),
}

ENGINES = {
    "engine from another TensorRT": (
        GOOD,
        replace(TARGET, tensorrt="11.3.0.1"),
        "the engine is of another TensorRT: expected TensorRT 11.3.0.1, found TensorRT 11.4.0.106",
        f"{REBUILD}, or pip install tensorrt==11.3.0.1",
    ),
    "wrong GPU architecture": (
        GOOD,
        replace(TARGET, architecture="sm_100"),
        "the engine is for another GPU architecture: expected sm_100, found sm_90 (NVIDIA H200)",
        REBUILD,
    ),
    "plugin library missing": (
        replace(GOOD, libraries=()),
        TARGET,
        f"the engine's plugin library: expected libkvc_plugins.so with SHA-256 {SHA256}, found none",
        "KVC_TRT_PLUGINS=/path/to/libkvc_plugins.so",
    ),
    "plugin library tampered with": (
        replace(GOOD, libraries=(replace(PLUGINS, sha256=OTHER),)),
        TARGET,
        f"expected libkvc_plugins.so with SHA-256 {SHA256}, found /opt/libkvc_plugins.so with SHA-256 {OTHER}",
        REBUILD,
    ),
    "plugins of another version": (
        GOOD,
        replace(TARGET, library_abi=ABI_VERSION + 1),
        f"the engine's plugins are of another version: expected ABI {ABI_VERSION}, found ABI {ABI_VERSION + 1}",
        REBUILD,
    ),
}


def test_a_complete_machine_lacks_nothing():
    assert missing_here(GOOD) == []
    assert missing_for(TARGET, GOOD, REBUILD) == []
    assert library_of(TARGET, GOOD) is PLUGINS


@pytest.mark.parametrize("case", MACHINES)
def test_each_lack_of_a_machine_is_one_message_with_a_hint(case):
    machine, message, hint = MACHINES[case]
    missing = missing_here(machine)
    assert [str(one) for one in missing] == [message]
    assert hint in missing[0].hint
    with pytest.raises(UnsupportedEnvironment) as caught:
        refuse(missing)
    assert (caught.value.exit_code, caught.value.message, caught.value.hint) == (3, message, missing[0].hint)


@pytest.mark.parametrize("case", ENGINES)
def test_each_mismatch_of_engine_and_machine_is_one_message_with_a_hint(case):
    machine, target, message, hint = ENGINES[case]
    missing = missing_for(target, machine, REBUILD)
    assert len(missing) == 1
    assert message in str(missing[0])
    assert hint in missing[0].hint
    assert missing[0].error().exit_code == 3


@pytest.mark.parametrize("case", [case for case in MACHINES if "librar" not in case and case != "emulated kernels"])
def test_loading_an_engine_finds_what_doctor_says(case):
    """`doctor` and loading report the same facts in the same words."""
    machine, message, _ = MACHINES[case]
    assert message in map(str, missing_for(TARGET, machine, REBUILD))


def test_a_bare_machine_gets_every_missing_part_in_one_list():
    said = [str(one) for one in missing_here(GpuMachine())]
    assert [line.split(":")[0] for line in said] == ["TensorRT", "cuda-bindings", "NVIDIA driver", "plugin library"]


def test_an_older_driver_of_the_same_major_version_serves():
    assert missing_here(replace(GOOD, cuda_runtime=(13, 5), driver=(13, 0))) == []


def test_hardware_compatibility_lets_other_architectures_pass():
    target = replace(TARGET, architecture="sm_80", portable=True)
    assert missing_for(target, GOOD, REBUILD) == []
    old = replace(GOOD, gpu=Gpu("Tesla T4", (7, 5), 16 << 30, 15 << 30))
    assert [one.what for one in missing_for(target, old, REBUILD)] == ["NVIDIA GPU"]


def test_the_library_is_known_by_its_hash_whatever_kind_it_is():
    kernels = PluginLibrary("python", Path("/opt/libkvc_kernels.so"), OTHER)
    machine = replace(GOOD, libraries=(PLUGINS, kernels))
    target = replace(TARGET, library="libkvc_kernels.so", library_sha256=OTHER)
    assert missing_for(target, machine, REBUILD) == []
    assert library_of(target, machine) is kernels


@pytest.mark.parametrize(
    "target",
    [None, {}, {"backend": "onnxruntime", "architecture": "cpu"}, {**MANIFEST["target"], "plugins": {"file": "x"}}],
)
def test_a_manifest_without_a_tensorrt_target_is_refused(target):
    with pytest.raises(InputError, match="expected the target of a TensorRT engine, found") as caught:
        BuiltFor.of(target, "engine")
    assert caught.value.exit_code == 2


def test_a_prompt_longer_than_every_profile_is_refused():
    profiles = prefill_profiles(max_input_len=4000, max_batch_size=8)
    with pytest.raises(InputError, match="expected at most 4096 padded tokens") as caught:
        choose_profile(profiles, 1, 8192)
    assert caught.value.exit_code == 2
    assert "--max-input-len" in caught.value.hint


def test_a_batch_larger_than_every_profile_is_refused():
    with pytest.raises(InputError, match="9 rows: expected at most 8 rows") as caught:
        choose_profile(decode_profiles(8), 9)
    assert "--max-batch-size" in caught.value.hint


@pytest.mark.parametrize(
    ("status", "name", "kind", "hint"),
    [
        (2, "cudaErrorMemoryAllocation", DeviceOutOfMemory, "kvc-trt plan --backend tensorrt"),
        (35, "cudaErrorInsufficientDriver", UnsupportedEnvironment, "update NVIDIA's driver"),
        (100, "cudaErrorNoDevice", UnsupportedEnvironment, "nvidia-smi"),
        (700, "cudaErrorIllegalAddress", UnsupportedEnvironment, "kvc-trt doctor"),
    ],
)
def test_errors_of_cuda_are_reported_in_one_line(status, name, kind, hint):
    error = failure(status, name, "allocating 12.0 GiB")
    assert type(error) is kind
    assert error.message == f"CUDA, allocating 12.0 GiB: {name} ({status})"
    assert hint in error.hint
    assert error.exit_code == 3


def test_doctor_shows_gpu_driver_and_plugins():
    found = describe(GOOD)
    assert found["gpu"] == "NVIDIA H200 (sm_90, 140.4 GiB)"
    assert found["driver"] == "for CUDA 13.0"
    assert found["plugins"] == f"/opt/libkvc_plugins.so (cuda, ABI {ABI_VERSION}, SHA-256 {SHA256[:16]})"
    assert describe(GpuMachine()) == {}
