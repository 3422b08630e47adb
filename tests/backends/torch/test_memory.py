"""Bytes by formula against bytes that exist: counted on real tensors, and at full size on tensors without memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvc_trt.backends.torch import memory
from kvc_trt.backends.torch.executor import TorchExecutor
from kvc_trt.backends.torch.model import decoder as decoder_module
from kvc_trt.backends.torch.model.prompt_attention import bucketed
from kvc_trt.backends.torch.model.weights import TorchWeights
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.graph.state import state_tensors
from kvc_trt.graph.weights import EngineWeights
from kvc_trt.kernels.stored_parts import StoredTables
from kvc_trt.models.cache_formats import CACHE_FORMATS
from kvc_trt.models.config import Experts, ModelDescription
from kvc_trt.sizes import readable_size
from tests.backends.prompts import padded, prompts
from tests.backends.torch import meta
from tests.small_model import SMALL as MODEL
from tests.stored_tables import FORMATS

CPU = torch.device("cpu")
MODELS = {
    "plain": MODEL,
    "tied and biased": replace(MODEL, tie_word_embeddings=True, qkv_bias=True),
    "normed heads": replace(MODEL, architecture="Qwen3ForCausalLM", qk_norm=True, head_size=32),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("model", MODELS)
def test_weights_take_what_the_formula_says(model, precision, make_program):
    source = EngineWeights(make_program("full", precision, model=MODELS[model]).weight_file)
    for dtype in (torch.float32, torch.bfloat16):
        found = TorchWeights.read(MODELS[model], source, CPU, dtype)
        own_head = "lm_head.weight" in source.names()
        assert found.nbytes == memory.weight_bytes(MODELS[model], dtype.itemsize, own_head=own_head)


def test_an_8b_model_takes_16_gigabytes_in_bfloat16():
    whole = replace(meta.LLAMA, num_hidden_layers=32)
    assert memory.weight_bytes(whole, 2, own_head=True) == pytest.approx(16.06e9, rel=1e-3)
    assert meta.weights(meta.LLAMA).nbytes == memory.weight_bytes(meta.LLAMA, 2, own_head=True)


@pytest.mark.parametrize("policy", ["full", "rocketkv", "snapkv++"])
def test_caches_take_what_the_formula_says(policy, make_program):
    executor = TorchExecutor(make_program(policy))
    executor.allocate(3)
    assert executor.state_bytes() == memory.cache_bytes(executor.program.state, 3)


@pytest.mark.parametrize("form", FORMATS)
def test_storing_in_a_format_takes_at_most_what_the_formula_says(form):
    """Covers storing by the reference, which makes float32 tables, and the contiguous copies before it."""
    keys, values = torch.randn(2, 3, 2, 200, MODEL.head_size)
    with meta.LiveBytes() as live:
        StoredTables.of(keys.clone(), values.clone(), CACHE_FORMATS[form])
    assert live.most <= memory.storing_bytes(MODEL, 3, 200, itemsize=4)


def prefill_peak(policy, rows, context, monkeypatch, block=8192):
    """Return the most bytes that live at once in a prefill of 3 layers of Llama-3.1-8B.

    Attention holds what it pads for a GPU; the kernel itself holds none.
    """

    def padded(*tables):
        held = [bucketed(table) for table in tables]
        return torch.empty_like(held[0])[:, :, : tables[0].shape[2]]

    monkeypatch.setattr(decoder_module, "prefill_attention", padded)
    decoder = meta.decoder(policy, context, block=block)
    ids = torch.zeros(rows, context - 128, dtype=torch.int64, device=meta.META)
    lengths = torch.zeros(rows, dtype=torch.int64, device=meta.META)
    with meta.LiveBytes() as live:
        found = decoder.prefill(ids, lengths)
    assert sum(tensor.nbytes for tensor in found.state.values()) <= live.now
    return live.most


@pytest.mark.parametrize(("rows", "context"), [(1, 32768), (4, 8192), (1, 131072)])
@pytest.mark.parametrize("policy", ["full", "rocketkv"])
def test_a_prefill_stays_below_its_bound_and_not_far_below(policy, rows, context, monkeypatch):
    most = prefill_peak(policy, rows, context, monkeypatch)
    state = state_tensors(meta.LLAMA, meta.resolved(policy, context), "bfloat16")
    bound = memory.prefill_bytes(meta.LLAMA, state, rows, context - 128, itemsize=2, block=8192)
    assert most <= bound <= 1.6 * most


MIXTRAL = replace(meta.LLAMA, description=ModelDescription(experts=Experts(8, 2, meta.LLAMA.intermediate_size)))


@pytest.mark.parametrize("tokens", [1, 9, 16])
def test_a_short_prefill_of_experts_stays_below_its_bound(tokens, monkeypatch):
    """It copies the matrices of each token's experts, which are larger than everything else."""
    monkeypatch.setattr(decoder_module, "prefill_attention", lambda query, keys, values: torch.empty_like(query))
    decoder = meta.decoder("full", 1024, MIXTRAL)
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=meta.META)
    with meta.LiveBytes() as live:
        decoder.prefill(ids, torch.zeros(1, dtype=torch.int64, device=meta.META))
    state = state_tensors(MIXTRAL, meta.resolved("full", 1024, MIXTRAL), "bfloat16")
    assert live.most <= memory.prefill_bytes(MIXTRAL, state, 1, tokens, itemsize=2) <= 1.6 * live.most


def test_a_step_counts_copies_of_experts_for_the_rows_that_have_them():
    """More rows are grouped by expert, and copy nothing."""
    one, most, more = (
        memory.step_bytes(MIXTRAL, rows, 2) - memory.step_bytes(meta.LLAMA, rows, 2)
        for rows in (1, memory.STEP_TOKENS, 4 * memory.STEP_TOKENS)
    )
    assert one == 2 * 3 * 14336 * 4096 * 2
    assert most == more == 16 * one


def test_one_layers_full_cache_lives_at_a_time(monkeypatch):
    """More layers add the entries that they keep, not those that they were given."""
    few = prefill_peak("rocketkv", 1, 32768, monkeypatch)
    monkeypatch.setattr(meta, "LAYERS", 6)
    deeper = replace(meta.LLAMA, num_hidden_layers=6)
    monkeypatch.setattr(meta.decoder, "__defaults__", (deeper,))
    more = prefill_peak("rocketkv", 1, 32768, monkeypatch)
    kept = memory.cache_bytes(state_tensors(deeper, meta.resolved("rocketkv", 32768), "bfloat16"), 1) // 2
    full = 3 * 2 * 8 * 32640 * 128 * 2
    assert few < more <= few + 1.1 * kept
    assert more - few < full / 5


def test_smaller_blocks_take_less_and_give_the_same(make_program, monkeypatch):
    assert prefill_peak("rocketkv", 1, 32768, monkeypatch, 2048) < prefill_peak("rocketkv", 1, 32768, monkeypatch)
    monkeypatch.undo()
    executor = TorchExecutor(make_program("rocketkv"))
    ids, lengths = (torch.from_numpy(array) for array in padded(prompts()))
    whole = executor.decoder.prefill(ids, lengths)
    executor.decoder._block = 37
    blocks = executor.decoder.prefill(ids, lengths)
    torch.testing.assert_close(blocks.logits, whole.logits, atol=1e-5, rtol=1e-5)
    for name, tensor in whole.state.items():
        torch.testing.assert_close(blocks.state[name], tensor, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 200, 300])
def test_groups_of_prompts_give_what_all_together_give(tokens, make_program):
    program = make_program("rocketkv, a skipped layer")
    together, apart = TorchExecutor(program), TorchExecutor(program, prefill_tokens=tokens)
    expected, found = (executor.prefill(*padded(prompts())) for executor in (together, apart))
    torch.testing.assert_close(torch.from_numpy(found.logits), torch.from_numpy(expected.logits), atol=1e-5, rtol=1e-5)
    assert found.cache_lengths.tolist() == expected.cache_lengths.tolist()
    for name, tensor in expected.state.items():
        torch.testing.assert_close(found.state[name], tensor, atol=1e-5, rtol=1e-5)


def refusal(monkeypatch, free, action):
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    with pytest.raises(UnsupportedEnvironment) as caught:
        action()
    assert caught.value.hint
    return caught.value.message


def test_engines_that_do_not_fit_are_refused_before_allocation(make_program, monkeypatch):
    program = make_program("rocketkv")
    executor = TorchExecutor(program)
    needed = memory.weight_bytes(MODEL, 4, own_head=True)
    monkeypatch.setattr(TorchWeights, "read", None)
    text = refusal(monkeypatch, needed - 1, lambda: executor.weights)
    assert text.startswith(
        f"the weights need {readable_size(needed)}; this machine has {readable_size(needed - 1)} free"
    )
    monkeypatch.setattr(torch, "full", None)
    assert "the caches of 2 rows need" in refusal(monkeypatch, 1000, lambda: executor.allocate(2))
    batch = padded(prompts())
    assert "prefill of 3 x 200 tokens needs" in refusal(monkeypatch, 1000, lambda: executor.prefill(*batch))


def test_a_refusal_says_by_how_much(monkeypatch):
    text = refusal(
        monkeypatch, 80 * 2**30, lambda: memory.require(137 * 2**30, "the caches of 8 rows need", CPU, "fewer rows")
    )
    assert text == "the caches of 8 rows need 137.0 GiB; this machine has 80.0 GiB free, 57.0 GiB too few"
