"""Every check between an engine directory and TensorRT, and the libraries that are loaded with it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvc_trt.backends.opening import open_engine
from kvc_trt.backends.tensorrt import device, machine, plugins
from kvc_trt.backends.tensorrt.plugins import check_trusted, fingerprint, named_path
from kvc_trt.backends.tensorrt.running.context import sizes_of
from kvc_trt.backends.tensorrt.running.loading import DTYPES, TensorInfo, load, state_problems
from kvc_trt.engine.manifest import rebuild_hint
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.graph.state import StateTensor
from kvc_trt.kernels.structs import ABI_VERSION
from tests.backends.compiled import as_compiled
from tests.backends.tensorrt import rtx

SHA256 = "ab" * 32


@pytest.fixture
def tensorrt_engine(tiny_engine):
    return as_compiled(tiny_engine, "tensorrt", SHA256)


def test_the_directory_is_opened_without_tensorrt(tensorrt_engine):
    assert open_engine(tensorrt_engine).backend == "tensorrt"


def test_on_this_machine_loading_says_what_is_missing(tensorrt_engine):
    """Refused by its own facts, before any TensorRT object is made: the plans are no plans at all."""
    engine = open_engine(tensorrt_engine)
    if machine.inspect_machine(ask_libraries=False).gpu is not None:
        pytest.skip("this machine has a GPU")
    with pytest.raises(UnsupportedEnvironment, match=r"TensorRT: expected|NVIDIA driver: expected") as caught:
        load(engine)
    assert caught.value.hint


@pytest.mark.parametrize("damage", ["truncate", "change", "remove"])
def test_a_damaged_plan_is_refused_by_its_hash(tensorrt_engine, damage):
    plan = tensorrt_engine / "decode.engine"
    content = plan.read_bytes()
    if damage == "remove":
        plan.unlink()
    else:
        plan.write_bytes(content[:-100] if damage == "truncate" else b"\0" + content[1:])
    expected = {
        "truncate": "decode.engine has the wrong size: expected 2100 bytes, found 2000",
        "change": "decode.engine was changed: expected SHA-256",
        "remove": "decode.engine is missing",
    }[damage]
    with pytest.raises(InputError, match=expected) as caught:
        open_engine(tensorrt_engine)
    assert caught.value.hint == rebuild_hint(tensorrt_engine)
    assert caught.value.exit_code == 2


def tensors(*changes: TensorInfo) -> list[TensorInfo]:
    changed = {tensor.name: tensor for tensor in changes}
    base = TensorInfo("k_cache.0", True, "BF16", (-1, 2, 40, 16), True)
    usual = [base, replace(base, name="token", dtype="INT64", shape=(-1,))]
    return [changed.get(tensor.name, tensor) for tensor in usual]


class TestState:
    @pytest.fixture
    def wanted(self):
        tensor = StateTensor(0, 0, "k_cache.0", "bfloat16", (2, 40, 16), 0.0, "k_cache_out.0")
        return [("k_cache.0", tensor, True)]

    def test_state_tensors_of_a_right_engine_have_no_problems(self, wanted):
        assert state_problems("decode", tensors(), wanted) == []

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"shape": (-1, 2, 41, 16)}, "expected input BF16 [B,2,40,16], found input BF16 [B,2,41,16]"),
            ({"dtype": "HALF"}, "found input HALF [B,2,40,16]"),
            ({"is_input": False}, "found output BF16 [B,2,40,16]"),
            ({"on_device": False}, "decode: k_cache.0 is on the host"),
        ],
    )
    def test_a_wrong_state_tensor_is_named_with_what_was_expected(self, wanted, change, problem):
        (found,) = state_problems("decode", tensors(replace(tensors()[0], **change)), wanted)
        assert problem in found

    def test_bounds_in_fp8_are_int8(self):
        wanted = [("bounds.0", StateTensor(0, 0, "bounds.0", "int8", (2, 32, 16), -5.0, "bounds_out.0"), True)]
        bounds = TensorInfo("bounds.0", True, "INT8", (-1, 2, 32, 16), True)
        assert state_problems("decode", [bounds], wanted) == []
        (found,) = state_problems("decode", [replace(bounds, dtype="BF16")], wanted)
        assert "bounds.0: expected input INT8 [B,2,32,16], found input BF16 [B,2,32,16]" in found

    def test_a_missing_state_tensor_is_named(self, wanted):
        assert state_problems("decode", tensors()[1:], wanted) == ["decode: k_cache.0 is missing"]

    def test_types_have_the_names_of_tensorrt(self):
        trt = rtx.load_or_skip()
        assert {trt.DataType.__members__[name].name for name in DTYPES.values()} == set(DTYPES.values())


class TestLibraries:
    def test_a_library_that_everybody_can_write_is_not_loaded(self, tmp_path):
        library = tmp_path / "libkvc_plugins.so"
        library.write_bytes(b"")
        check_trusted(library)
        library.chmod(0o666)
        with pytest.raises(UnsupportedEnvironment, match="can be written by everybody") as caught:
            check_trusted(library)
        assert f"chmod go-w {library}" in caught.value.hint

    def test_a_library_in_a_folder_that_everybody_can_write_is_not_loaded(self, tmp_path):
        library = tmp_path / "open" / "libkvc_plugins.so"
        library.parent.mkdir()
        library.write_bytes(b"")
        library.parent.chmod(0o777)
        with pytest.raises(UnsupportedEnvironment, match=r"open can be written by everybody"):
            check_trusted(library)

    def test_a_missing_library_is_named(self, tmp_path):
        with pytest.raises(UnsupportedEnvironment, match="expected a plugin library, found nothing"):
            check_trusted(tmp_path / "none.so")
        with pytest.raises(UnsupportedEnvironment, match="found no regular file"):
            check_trusted(tmp_path)

    def test_only_absolute_paths_to_a_library_are_accepted(self, tmp_path):
        packaged = tmp_path / "libkvc_plugins.so"
        assert named_path(None, packaged) is None
        packaged.write_bytes(b"")
        assert named_path(None, packaged) == packaged
        assert named_path("/opt/other.so", packaged) == Path("/opt/other.so")
        with pytest.raises(InputError, match="expected an absolute path"):
            named_path("libkvc_plugins.so", packaged)

    def test_a_fingerprint_executes_nothing(self, tmp_path):
        """The file is no library at all, which only loading it would show."""
        library = tmp_path / "libkvc_plugins.so"
        library.write_bytes(b"not a library")
        found = fingerprint(library, "plugins")
        assert found.record() == {"file": library.name, "sha256": found.sha256, "abi": None}
        with pytest.raises(UnsupportedEnvironment, match="is no plugin library"):
            plugins.asked(found)

    def test_the_emulated_kernels_say_what_they_are(self, emulation, monkeypatch, tmp_path):
        copy = tmp_path / "libkvc_kernels.so"
        shutil.copyfile(emulation.path, copy)
        monkeypatch.setenv("KVC_TRT_KERNELS", str(copy))
        monkeypatch.delenv(plugins.VARIABLE, raising=False)
        (found,) = plugins.find_libraries(ask=True)
        assert (found.kind, found.abi, found.executor) == ("python", ABI_VERSION, "emulation")

    def test_a_configured_library_that_does_not_exist_is_reported(self, monkeypatch):
        monkeypatch.setenv(plugins.VARIABLE, "/nowhere/libkvc_plugins.so")
        facts = machine.inspect_machine(ask_libraries=False)
        assert facts.libraries == ()
        assert "/nowhere/libkvc_plugins.so: expected a plugin library" in facts.library_problem


class TestCuda:
    """The real cuda-bindings, which answer without a driver too."""

    @pytest.fixture
    def runtime(self):
        return pytest.importorskip("cuda.bindings.runtime")

    def test_versions_are_known_without_a_driver(self, runtime):
        major, minor = machine.cuda_version(runtime)
        assert major >= 12
        assert 0 <= minor < 10
        assert (machine.driver_version() is None) == (int(runtime.cudaDriverGetVersion()[1]) == 0)

    def test_a_refusal_carries_its_name(self, runtime):
        if machine.driver_version() is not None:
            pytest.skip("this machine has a driver")
        for attempt in (device.free_memory, device.Stream, lambda: device.DeviceBlock(1)):
            with pytest.raises(UnsupportedEnvironment, match=r"cudaErrorInsufficientDriver \(35\)"):
                attempt()

    def test_a_machine_without_a_driver_reports_no_gpu(self, runtime):
        facts = machine.inspect_machine(ask_libraries=False)
        if facts.driver is not None:
            pytest.skip("this machine has a driver")
        assert facts.cuda_runtime is not None
        assert (facts.gpu, facts.gpu_problem) == (None, None)

    def test_every_name_that_is_called_exists(self, runtime):
        for name in (
            "cudaMalloc", "cudaFree", "cudaMallocHost",
            "cudaFreeHost", "cudaMemcpyAsync", "cudaMemsetAsync",
            "cudaMemGetInfo", "cudaGetDevice", "cudaGetDeviceProperties",
            "cudaStreamCreateWithFlags", "cudaStreamDestroy", "cudaStreamSynchronize",
            "cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate",
            "cudaGraphLaunch", "cudaGraphDestroy", "cudaGraphExecDestroy",
            "cudaStreamNonBlocking",
        ):  # fmt: skip
            assert hasattr(runtime, name), name
        assert hasattr(runtime.cudaStreamCaptureMode, "cudaStreamCaptureModeThreadLocal")
        properties = runtime.cudaDeviceProp()
        assert isinstance(properties.name, bytes)
        assert isinstance(properties.major, int)


def test_dimensions_of_the_real_bindings_become_integers():
    trt = rtx.load_or_skip()
    assert sizes_of(trt.Dims((1, 2, 3))) == (1, 2, 3)
