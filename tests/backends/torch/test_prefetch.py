"""A captured step reads weights ahead: up to the room there is, beside the step, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvc_trt.backends.torch.executor import TorchExecutor
from kvc_trt.backends.torch.model import prefetch
from kvc_trt.backends.torch.model.prefetch import WeightPrefetch, weight_prefetch
from kvc_trt.kernels import use_library
from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.kernels.switches import WEIGHT_PREFETCH
from tests.backends.onnxruntime.test_executor import filled


class Stream:
    """Stands in for a CUDA stream: `log` lists which stream waits for which."""

    cuda_stream = None

    def __init__(self, name: str, log: list[tuple[str, ...]]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: Stream) -> None:
        self._log.append((self.name, "waits for", other.name))


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> tuple[Stream, list[tuple[str, ...]]]:
    """A side stream beside a main stream that is being captured, and the log of both."""
    log: list[tuple[str, ...]] = []
    main, side = Stream("main", log), Stream("side", log)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    return side, log


def grids(library: KernelLibrary, ahead: WeightPrefetch, *matrices: torch.Tensor) -> list[int]:
    """Blocks of each launch; one launch asks for 64 KiB. The emulation reads each byte that is asked for."""
    return [launch.grid[0] for launch in library.launches_of(lambda: ahead.start(*matrices))]


def test_a_side_branch_leaves_the_step_and_returns_to_it(emulation, capture):
    side, log = capture
    ahead = WeightPrefetch(emulation, side, 1 << 30)
    ahead.end()
    for _ in range(2):
        ahead.start(torch.zeros(64, 64))
    assert log == [("side", "waits for", "main")] * 2, "nothing of the step waits for what is read ahead"
    ahead.end()
    ahead.end()
    assert log[2:] == [("main", "waits for", "side")]


@pytest.mark.parametrize(
    ("room", "blocks"),
    [(1 << 30, [4, 2]), (3 * 65536, [3]), (4 * 65536, [4]), (4 * 65536 + 15, [4]), (4 * 65536 + 17, [4, 1]), (15, [])],
)
def test_matrices_are_read_in_order_as_far_as_there_is_room(emulation, capture, room, blocks):
    ahead = WeightPrefetch(emulation, capture[0], room)
    first, second = torch.zeros(4, 32768, dtype=torch.bfloat16), torch.zeros(2, 16384)
    assert grids(emulation, ahead, first, second) == blocks


def test_no_weights_are_prefetched_outside_a_capture(emulation, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ahead = WeightPrefetch(emulation, None, 1 << 30)
    assert grids(emulation, ahead, torch.zeros(64, 64)) == []
    ahead.end()


def test_a_cpu_prefetches_no_weights(emulation, make_program):
    """A step on a CPU launches the same with the emulated kernels and without them."""
    assert weight_prefetch(torch.device("cpu")) is None
    with use_library(emulation.path):
        assert weight_prefetch(torch.device("cpu")) is None
        executor = TorchExecutor(make_program("rocketkv"))
        executor.allocate(3)
        tokens, positions, lengths = filled(executor)
        launches = emulation.launches_of(lambda: executor.decode(tokens, positions, np.ascontiguousarray(lengths)))
    assert "prefetch" not in {launch.name.decode() for launch in launches}
    assert "sparse_attention" in {launch.name.decode() for launch in launches}


def test_an_older_gpu_prefetches_no_weights(emulation, monkeypatch):
    """sm_80 lacks the instruction; sm_90 gets half of its cache."""

    class Cuda:
        device_type = "cuda"

    class Properties:
        L2_cache_size = 50 << 20

    monkeypatch.setattr(prefetch, "current_library", Cuda)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "a stream")
    launched = []
    monkeypatch.setattr(WeightPrefetch, "launch_once", lambda ahead, device: launched.append(ahead))
    for capability, room in (((8, 0), None), ((9, 0), 25 << 20)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        ahead = weight_prefetch(torch.device("cuda"))
        assert (ahead and ahead._room) == room
    assert launched == [ahead], "its first launch is in no capture"


def test_the_prefetch_kernel_can_be_launched_once_outside_a_capture(emulation, capture):
    ahead = WeightPrefetch(emulation, capture[0], 1 << 30)
    (launch,) = emulation.launches_of(lambda: ahead.launch_once(torch.device("cpu")))
    assert (launch.name, list(launch.grid)) == (b"prefetch", [1, 1, 1])


def test_nothing_is_read_ahead_where_that_is_switched_off(emulation, capture):
    ahead = WeightPrefetch(emulation, capture[0], 1 << 30)
    with WEIGHT_PREFETCH.off():
        assert grids(emulation, ahead, torch.zeros(64, 64)) == []
    assert grids(emulation, ahead, torch.zeros(64, 64)) == [1]
