from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvc_trt.models.safetensors_file import SafetensorsFile, TensorPlan, write_safetensors
from kvc_trt.models.safetensors_writer import ALIGNMENT

DTYPES = ["float32", "float16", "bfloat16", "uint8", "int64"]


def array_of(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).integers(0, 100, shape)
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_reads_back_here_and_in_the_library(tmp_path, specification):
    library = pytest.importorskip("safetensors.numpy")
    arrays = {f"t{i}": array_of(dtype, tuple(shape), i) for i, (dtype, shape) in enumerate(specification)}
    plans = [TensorPlan(name, str(a.dtype), a.shape, lambda a=a: a) for name, a in arrays.items()]
    path = tmp_path / "w.safetensors"
    places = write_safetensors(path, plans, {"note": "ü"})
    file = SafetensorsFile(path)
    assert file.names() == list(arrays)
    assert file.metadata == {"note": "ü"}
    content = path.read_bytes()
    theirs = library.load_file(path)
    for name, array in arrays.items():
        offset, nbytes = places[name]
        assert offset % ALIGNMENT == 0
        assert content[offset : offset + nbytes] == array.tobytes()
        assert file.read(name).tobytes() == theirs[name].tobytes() == array.tobytes()
        assert file.read(name).dtype == array.dtype
        assert file.read(name).shape == array.shape


def test_pieces_make_the_same_file_and_progress_counts_every_byte(tmp_path):
    array = np.arange(60, dtype=np.float32).reshape(12, 5)
    whole, pieces = tmp_path / "a", tmp_path / "b"
    write_safetensors(whole, [TensorPlan("x", "float32", (12, 5), lambda: array)])
    seen: list[int] = []
    cut = TensorPlan("x", "float32", (12, 5), lambda: (array[i : i + 5] for i in (0, 5, 10)))
    write_safetensors(pieces, [cut], progress=seen.append)
    assert whole.read_bytes() == pieces.read_bytes()
    assert seen == [100, 100, 40]


def test_a_transposed_array_is_written_in_its_own_order(tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    write_safetensors(tmp_path / "x", [TensorPlan("x", "float32", (3, 2), lambda: array)])
    np.testing.assert_array_equal(SafetensorsFile(tmp_path / "x").read("x"), array)


@pytest.mark.parametrize(
    "made",
    [
        np.zeros((3, 4), np.float32),
        np.zeros((2, 5), np.float32),
        np.zeros((2, 4), np.float16),
        [np.zeros((1, 4), np.float32)],
        [np.zeros((1, 4), np.float32)] * 3,
    ],
)
def test_a_tensor_that_differs_from_its_plan_is_an_error(tmp_path, made):
    with pytest.raises(ValueError, match=r"planned|made"):
        write_safetensors(tmp_path / "x", [TensorPlan("x", "float32", (2, 4), lambda: made)])


@pytest.mark.parametrize("name", ["x", "__metadata__", "__padding__.0"])
def test_taken_and_reserved_names_are_refused(tmp_path, name):
    plans = [TensorPlan(n, "uint8", (1,), lambda: np.zeros(1, np.uint8)) for n in ("x", name)]
    with pytest.raises(ValueError, match="taken or reserved"):
        write_safetensors(tmp_path / "w", plans, {"k": "v"})


def test_memory_is_one_piece_at_a_time(tmp_path):
    """Pieces are asked for lazily: the next is made only after the last is on its way to disk."""
    alive = 0

    def pieces():
        nonlocal alive
        for _ in range(8):
            alive += 1
            assert alive == 1
            yield np.zeros((1, 1000), np.float32)
            alive -= 1

    write_safetensors(tmp_path / "x", [TensorPlan("x", "float32", (8, 1000), pieces)])
