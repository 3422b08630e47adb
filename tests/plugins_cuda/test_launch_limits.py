"""The launches of every operation stay within the limits of every GPU, for all models and the sizes that are served.

No kernel runs here: the emulation only checks and records launches, with addresses that do not exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache

import pytest

from benchmarks.kernels.cases import NEW_TOKENS, Case
from kvc_trt import policies
from kvc_trt.kernels.c_library import ARCHITECTURES, KernelError
from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.kernels.parameters import members
from kvc_trt.kernels.rotated import LIBRARY_OPERATORS
from kvc_trt.kernels.structs import Dtype, EmulatedLaunch, struct_of
from kvc_trt.kernels.switches import CLUSTER_STEP
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.cache_formats import CACHE_FORMATS
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.presets import list_presets, load_preset
from kvc_trt.operators.schema import Operator
from kvc_trt.operators.tensors import FP8_BOUNDS
from tests.plugins_cuda.mutants import RARELY_INLINED, Mutation, compile_mutant
from tests.plugins_cuda.toys import PLUGINS

OPERATIONS = {one.kernel.operation: one for one in LIBRARY_OPERATORS if one.kernel is not None}
OF_BOUNDS = [name for name, one in OPERATIONS.items() if FP8_BOUNDS in one.attributes]
STEP, PROMPT = "kvc_hybrid_attention", "kvc_compact"
OF_POLICY = {
    "rocketkv": tuple(OPERATIONS),
    "hybrid": (STEP, "kvc_rotated_hybrid_attention", "kvc_append_block", "kvc_raise_bounds"),
    "quest-matched": (STEP, "kvc_rotated_hybrid_attention"),
    "full": ("kvc_dense_attention", "kvc_rotated_dense_attention", "kvc_append_block"),
}
"""Operations that engines of these policies call; the other policies with kernels call some of them at other sizes."""
BATCHES, BUDGETS = (1, 4, 8, 16, 32), (256, 512, 1024, 2048)
CONTEXTS = (16384, 32768, 65536, 131072)
TURN = 2048
"""Tokens of a turn."""
WORKSPACE = 1 << 46
BY_DEFAULT = 48 * 1024
"""Bytes of shared memory that a block has, static arrays counted, if its kernel was not allowed more."""


@pytest.fixture(autouse=True)
def _first_device(emulation: KernelLibrary) -> Iterator[None]:
    yield
    emulation.set_device(ARCHITECTURES[0])


@dataclass(frozen=True)
class Call:
    """One call of an operation at the sizes of an engine."""

    operation: str
    model: ModelConfig
    parameters: PolicyParameters
    batch: int
    dtype: Dtype = Dtype.BFLOAT16
    cache_format: int = 0

    def numbers(self) -> dict[str, int]:
        """Return every number that any operation takes."""
        model, rule = self.model, self.parameters
        size, capacity = model.head_size, rule.capacity
        stored = capacity + TURN if self.operation == "kvc_compact_turn" else rule.max_input_len
        return {
            "dtype": int(self.dtype), "batch": self.batch, "heads": model.num_attention_heads,
            "kv_heads": model.num_key_value_heads, "head_size": size, "window": rule.window,
            "pool_kernel": rule.pool_kernel, "page_size": rule.page_size, "prompt_length": stored,
            "prompt_budget": rule.prompt_budget, "capacity": capacity, "top_r": rule.top_r, "top_k": rule.top_k,
            "token_budget": rule.token_budget, "dense_until": rule.dense_until, "selected_width": rule.selected_width,
            "fp8_bounds": int(rule.fp8_bounds), "block": TURN,
            "channels": 2 * size, "pages": rule.stored_pages(self.dtype.name.lower()), "reserved": 0,
            "recent": rule.recent,
            "cache_format": self.cache_format, "by_length": int(rule.by_length),
            "kv_stride_token": size, "kv_stride_head": stored * size,
            "kv_stride_batch": model.num_key_value_heads * stored * size,
        }  # fmt: skip

    def launches(self, library: KernelLibrary) -> list[EmulatedLaunch]:
        """Return the launches of the call; raises KernelError where a device would refuse it."""
        return library.checked_launches_of(lambda: self.make(library))

    def make(self, library: KernelLibrary) -> None:
        """The call itself, of addresses that do not exist."""
        fields, numbers = {}, self.numbers()
        for place, member in enumerate(members(self.operator)[1:], start=1):
            fields[member.name] = place << 46 if member.type.endswith("*") else numbers[member.name]
        struct = struct_of(self.operator)(**fields)
        library.call(self.operation, struct, WORKSPACE, WORKSPACE)

    @property
    def operator(self) -> Operator:
        return OPERATIONS[self.operation]


@cache
def resolved(policy: str, model: ModelConfig, context: int, budget: int) -> PolicyParameters:
    return policies.resolve(
        policy, model=model, token_budget=budget, max_input_len=context - NEW_TOKENS, max_output_len=NEW_TOKENS
    )


def models() -> dict[tuple[int, int, int], ModelConfig]:
    """Every preset, those of equal heads once, as if made for every length: launches know heads and sizes alone."""
    found = {}
    for name in list_presets():
        config = replace(load_preset(name).config, max_position_embeddings=CONTEXTS[-1], sliding_window=None)
        found[config.num_attention_heads, config.num_key_value_heads, config.head_size] = config
    return found


def calls(heads: tuple[int, int, int], policy: str, dtype: Dtype) -> Iterator[Call]:
    model = models()[heads]
    for context in CONTEXTS:
        for budget in BUDGETS if policy != "full" else BUDGETS[:1]:
            parameters = resolved(policy, model, context, budget)
            for batch in BATCHES:
                for operation in OF_POLICY[policy]:
                    yield Call(operation, model, parameters, batch, dtype)
                    if operation in OF_BOUNDS:
                        yield Call(operation, model, replace(parameters, fp8_bounds=True), batch, dtype)


def step(batch: int, context: int, budget: int, policy: str = "rocketkv", dtype: Dtype = Dtype.BFLOAT16) -> Call:
    """Return a step of Llama-3.1-8B."""
    model = load_preset("llama3.1-8b").config
    return Call(STEP, model, resolved(policy, model, context, budget), batch, dtype)


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT32], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("policy", OF_POLICY)
@pytest.mark.parametrize("heads", models(), ids=str)
def test_no_launch_is_refused(emulation: KernelLibrary, heads: tuple[int, int, int], policy: str, dtype: Dtype) -> None:
    for architecture in ARCHITECTURES:
        emulation.set_device(architecture)
        for call in calls(heads, policy, dtype):
            launches = call.launches(emulation)
            unknown = [launch.name for launch in launches if launch.registers == 0]
            assert not unknown, "not in plugins_cuda/emulation/kernel_resources.inc: make plugins, then --write"
            assert all(_has_room(architecture, launch) for launch in launches if launch.cluster_blocks > 1)


def _has_room(architecture: str, launch: EmulatedLaunch) -> bool:
    """True if all blocks in clusters fit on the machine at once: the multiprocessors of each GPU, one block on each.
    Clusters that select from prompts share multiprocessors, and may go in rounds."""
    x, y, z = launch.grid
    in_rounds = launch.name == b"select_prompt_in_cluster"
    return launch.cluster_blocks <= 8 and (in_rounds or x * y * z <= {"sm_90a": 132, "sm_100": 148}[architecture])


def test_the_limits_cover_every_launcher(emulation: KernelLibrary) -> None:
    """Covers every launcher at the sizes above, in every format, except compaction in place and the prefetch hint."""
    model = load_preset("llama3.1-8b").config
    asked = set()
    every = [
        Call(operation, model, resolved(policy, model, 32768, 512), 1, cache_format=form.code)
        for policy, operations in OF_POLICY.items()
        for operation in operations
        for form in CACHE_FORMATS.values()
    ]
    for architecture in ARCHITECTURES:
        emulation.set_device(architecture)
        asked |= {launch.name.decode() for call in every for launch in call.launches(emulation)}
        with CLUSTER_STEP.off(emulation):
            asked |= {launch.name.decode() for call in every for launch in call.launches(emulation)}
    source = "\n".join(path.read_text() for path in sorted((PLUGINS / "src").iterdir()))
    written = set(re.findall(r'launch<.*?>\(\s*"(\w+)"', source))
    assert written - asked == {"move_in_place", "prefetch"}
    assert asked <= written


# Refused unless kernels are allowed all that a device has: dynamic memory alone is within 48 KiB.
NEEDS_TO_BE_ALLOWED = {
    "hybrid, 64K, budget 2048": (step(1, 65536, 2048, "hybrid", Dtype.FLOAT32), "sm_80", "select_tokens"),
    "32K, budget 256, in clusters": (step(1, 32768, 256), "sm_90a", "score_and_select"),
    "64K, budget 256, batch 2, in clusters": (step(2, 65536, 256), "sm_90a", "score_and_select"),
}


def pages(count: int) -> Call:
    """Return a step over a cache of `pages` pages, of one token each."""
    one = step(1, 32768, 512)
    return replace(one, parameters=replace(one.parameters, capacity=count, page_size=1))


NEEDS_TO_BE_ALLOWED |= {f"{count} pages": (pages(count), "sm_80", "select_tokens") for count in (9889, 12288)}


@pytest.mark.parametrize("case", NEEDS_TO_BE_ALLOWED)
def test_static_arrays_count_against_what_a_block_has_by_default(emulation: KernelLibrary, case: str) -> None:
    call, architecture, kernel = NEEDS_TO_BE_ALLOWED[case]
    emulation.set_device(architecture)
    with CLUSTER_STEP.off(emulation):  # it needs more than 48 KiB of dynamic memory alone
        (launch,) = (one for one in call.launches(emulation) if one.name == kernel.encode())
    assert launch.dynamic_shared_bytes <= BY_DEFAULT < launch.static_shared_bytes + launch.dynamic_shared_bytes


@pytest.fixture(scope="module")
def forgetful() -> KernelLibrary:
    """The operation with launches that ask for more shared memory only where the dynamic one alone is over 48 KiB."""
    mistake = Mutation(
        "forgets_static", "src/launch_kernel.h", "if (bytes == 0) {", f"if (bytes <= {BY_DEFAULT}) {{"
    )  # fmt: skip
    return KernelLibrary(compile_mutant(mistake, "src/hybrid_attention.cu", flags=(RARELY_INLINED,)))


@pytest.mark.slow
@pytest.mark.parametrize("case", NEEDS_TO_BE_ALLOWED)
def test_a_launcher_that_forgets_static_arrays_is_refused(forgetful: KernelLibrary, case: str) -> None:
    call, architecture, kernel = NEEDS_TO_BE_ALLOWED[case]
    forgetful.set_device(architecture)
    with (
        CLUSTER_STEP.off(forgetful),
        pytest.raises(KernelError, match=rf"kernel {kernel}: \d+ bytes of dynamic shared memory beside \d+ of static"),
    ):
        call.launches(forgetful)


def test_the_first_launches_may_come_from_several_threads(emulation: KernelLibrary) -> None:
    """The launches belong to two engines of other sizes: neither takes back the other's allowance."""
    every = [step(batch, context, 1024) for batch in BATCHES for context in CONTEXTS]
    with ThreadPoolExecutor(4) as threads:
        launches = emulation.checked_launches_of(lambda: list(threads.map(lambda call: call.make(emulation), every)))
    assert len(launches) == 4 * len(every)


def test_the_benchmarks_sizes_are_those_of_an_engine() -> None:
    case = Case(8, 32768, 1024)
    assert case.parameters == step(8, 32768, 1024).parameters
