"""The prompt tokens that stay: our decoder under a policy against kvpress's press on transformers' model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvc_trt.methods.expected_attention import EXPECTED_ATTENTION
from kvc_trt.methods.snapkv_gqa import SNAPKV_GQA
from kvc_trt.reference import compaction, keep_expected
from kvc_trt.reference.selection import best_ascending
from tests.oracles.presses import Kept, answer, assert_same_sets, import_presses, press_prompt, ratio, read

import_presses()

from kvpress.presses.expected_attention_press import ExpectedAttentionPress  # noqa: E402
from kvpress.presses.key_rerotation_press import KeyRerotationPress  # noqa: E402
from kvpress.presses.keydiff_press import KeyDiffPress  # noqa: E402
from kvpress.presses.observed_attention_press import ObservedAttentionPress  # noqa: E402
from kvpress.presses.snapkv_press import SnapKVPress  # noqa: E402
from kvpress.presses.streaming_llm_press import StreamingLLMPress  # noqa: E402
from kvpress.presses.tova_press import TOVAPress  # noqa: E402

MODELS = {
    "grouped": ("llama", {}),
    "rescaled": ("llama3.1", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "multi-head": ("longchat", {}),
}
NEW = 4


@dataclass
class RocketKVPress(SnapKVPress):  # type: ignore[misc]
    """Stage 1 of RocketKV in the press's terms: rows are summed, then the group, then the maximum is spread."""

    def score(
        self, module: Any, hidden: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        rotary = kwargs["position_embeddings"]
        attention = self.compute_window_attention(module, hidden, keys, self.window_size, rotary)
        votes = attention.sum(dim=2).unflatten(1, (keys.shape[1], -1)).sum(dim=2)
        pooled = functional.max_pool1d(votes, self.kernel_size, stride=1, padding=self.kernel_size // 2)
        return functional.pad(pooled, (0, self.window_size), value=torch.inf)


@dataclass
class HeavyHitterPress(ObservedAttentionPress):  # type: ignore[misc]
    """H2O in the press's terms: sums are not divided by the rows that saw a token, the last tokens always stay."""

    recent: int = 0

    def score(self, *arguments: Any) -> Tensor:
        per_row: Tensor = super().score(*arguments)
        n = per_row.shape[-1]
        total = per_row * torch.arange(n, 0, -1)
        return total.index_fill(-1, torch.arange(n - self.recent, n), torch.inf)


@pytest.fixture(params=MODELS)
def pair(request: pytest.FixtureRequest, family: Callable[..., Any]) -> Any:
    name, changes = MODELS[request.param]
    return family(name, **changes)


def prompt(pair: Any, n: int, seed: int) -> Tensor:
    return torch.randint(0, pair.config.vocab_size, (n,), generator=torch.Generator().manual_seed(seed))


def kept_by_policy(pair: Any, policy: str, budget: int, ids: Tensor, **overrides: int) -> list[Tensor]:
    """Positions [G,k] that every layer of our decoder keeps of a prompt [n]."""
    decoder = pair.decoder(policy, budget, len(ids), NEW, **overrides)
    _, cache = decoder.prefill(ids[None], torch.tensor([len(ids)]))
    return [layer.indices[0].long() for layer in cache.caches]


def check(found: list[Tensor], expected: list[Kept]) -> None:
    assert len(found) == len(expected) == 3
    for positions, press in zip(found, expected, strict=True):
        assert_same_sets(positions, press)


@pytest.mark.parametrize(("n", "window", "kernel", "budget"), [(150, 32, 7, 48), (333, 16, 63, 120), (90, 32, 5, 33)])
@pytest.mark.parametrize("policy", ["snapkv++", "rocketkv"])
def test_rocketkvs_eviction_keeps_what_its_press_keeps(
    policy: str, pair: Any, n: int, window: int, kernel: int, budget: int
) -> None:
    ids = prompt(pair, n, n)
    expected = press_prompt(RocketKVPress(ratio(budget, n), window, kernel), pair.hugging_face, ids).layers
    check(kept_by_policy(pair, policy, 40, ids, window=window, pool_kernel=kernel, prompt_budget=budget), expected)


@pytest.mark.parametrize("n", [90, 150])
def test_answers_after_eviction_equal_those_after_the_press(pair: Any, n: int) -> None:
    """Both caches evicted, positions going on from n: the same logits, though the press stores tokens by their rank."""
    ids = prompt(pair, n + NEW, n + 1)
    pressed = press_prompt(RocketKVPress(ratio(48, n), 16, 7), pair.hugging_face, ids[:n])
    assert pressed.cache.get_seq_length() == 48
    decoder = pair.decoder("snapkv++", 40, n, NEW, window=16, pool_kernel=7, prompt_budget=48)
    _, cache = decoder.prefill(ids[None, :n], torch.tensor([n]))
    found = torch.cat([decoder.decode(token[None], cache) for token in ids[n:]])
    torch.testing.assert_close(found, answer(pair.hugging_face, pressed.cache, n, ids[n:]), rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize(("n", "budget"), [(150, 80), (333, 100), (70, 66)])
def test_our_votes_with_average_pooling_keep_what_the_default_press_keeps(pair: Any, n: int, budget: int) -> None:
    """Window 64, kernel 5, average pooling that counts zeros past the ends: our votes, pooled so, keep its set."""
    ids, seen = prompt(pair, n, n), []

    def recorded(q_window: Tensor, keys: Tensor, *rest: Any) -> Any:
        seen.append((q_window, keys))
        return SNAPKV_GQA.compact(q_window, keys, *rest)

    decoder = pair.decoder("snapkv-gqa", budget + NEW, n, NEW, window=64)
    decoder.method = SimpleNamespace(compact=recorded)
    decoder.prefill(ids[None], torch.tensor([n]))
    found = []
    for q_window, keys in seen:
        votes = compaction.scores(q_window, keys, torch.tensor([n]), pool_kernel=1).values[0, :, : n - 64]
        best = best_ascending(functional.avg_pool1d(votes, 5, stride=1, padding=2), budget - 64)
        found.append(torch.cat([best, torch.arange(n - 64, n).expand(len(best), 64)], dim=1))
    check(found, press_prompt(SnapKVPress(ratio(budget, n)), pair.hugging_face, ids).layers)


@pytest.mark.parametrize(("n", "budget", "seed"), [(150, 80, 0), (333, 100, 1), (70, 66, 2)])
def test_snapkv_by_group_keeps_what_its_press_keeps(pair: Any, n: int, budget: int, seed: int) -> None:
    """The press as it comes but for pooling, where average and maximum differ: a kernel of one is neither."""
    ids = prompt(pair, n, seed)
    expected = press_prompt(SnapKVPress(ratio(budget, n), 64, 1), pair.hugging_face, ids).layers
    check(kept_by_policy(pair, "snapkv-gqa", budget + NEW, ids, window=64, pool_kernel=1), expected)


def ungrouped(pair: Any, family: Callable[..., Any]) -> Any:
    """transformers' model with the same function and one KV head per query head: the group's weights, repeated."""
    heads, groups = pair.config.num_attention_heads, pair.config.num_key_value_heads
    model = family("llama3.1", num_attention_heads=heads, num_key_value_heads=heads).hugging_face
    state = pair.hugging_face.state_dict()
    for name, tensor in state.items():
        if "k_proj" in name or "v_proj" in name:
            state[name] = tensor.unflatten(0, (groups, -1)).repeat_interleave(heads // groups, dim=0).flatten(0, 1)
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize(("n", "window", "kernel", "kept"), [(150, 32, 7, 48), (333, 16, 63, 120), (150, 64, 1, 80)])
def test_snapkv_by_query_head_keeps_what_its_press_keeps(
    n: int, window: int, kernel: int, kept: int, family: Callable[..., Any]
) -> None:
    """A press chooses for each KV head, so it is shown a model in which every query head has one of its own."""
    pair = family("llama3.1")
    ids = prompt(pair, n, n)
    press = SnapKVPress if kernel == 1 else RocketKVPress
    expected = press_prompt(press(ratio(kept, n), window, kernel), ungrouped(pair, family), ids).layers
    found = kept_by_policy(pair, "snapkv", 3 * kept + NEW, ids, window=window, pool_kernel=kernel)
    assert found[0].shape == (6, kept)
    check(found, expected)


@pytest.mark.parametrize(("n", "budget", "sinks"), [(150, 40, 4), (70, 69, 4), (333, 100, 0), (333, 100, 17)])
def test_streaming_llm_keeps_what_its_press_keeps(pair: Any, n: int, budget: int, sinks: int) -> None:
    ids = prompt(pair, n, n)
    expected = press_prompt(StreamingLLMPress(ratio(budget, n), sinks), pair.hugging_face, ids).layers
    check(kept_by_policy(pair, "streaming-llm", budget, ids, sinks=sinks), expected)
    if not sinks:
        check(kept_by_policy(pair, "sliding-window", budget, ids), expected)


@pytest.mark.parametrize(("n", "budget"), [(150, 40), (70, 60)])
def test_streaming_llm_with_cache_positions_answers_as_key_rerotation(pair: Any, n: int, budget: int) -> None:
    """Keys rotated by their rank in the cache. A step drops the oldest token first, so the press keeps one less."""
    ids = prompt(pair, n + 1, n)
    cache = read(KeyRerotationPress(StreamingLLMPress(ratio(budget - 1, n))), pair.hugging_face, ids[:n])
    expected = answer(pair.hugging_face, cache, budget - 1, ids[n:])
    decoder = pair.decoder("streaming-llm", budget, n, 1, positions="cache")
    _, ours = decoder.prefill(ids[None, :n], torch.tensor([n]))
    torch.testing.assert_close(decoder.decode(ids[n:], ours), expected, rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize("n", [70, 150])
def test_our_attention_sums_divided_by_rows_keep_what_the_press_keeps(pair: Any, n: int) -> None:
    """The press divides by the rows that saw a token and protects no last tokens: our sums, divided, keep its set."""
    ids = prompt(pair, n, n)
    pair.hugging_face.set_attn_implementation("eager")
    expected = press_prompt(ObservedAttentionPress(ratio(40, n)), pair.hugging_face, ids).layers
    _, cache = pair.decoder("h2o", n + NEW, n, NEW).prefill(ids[None], torch.tensor([n]))
    received = [layer.scores[0, :, :n] / torch.arange(n, 0, -1) for layer in cache.caches]
    check([best_ascending(one, 40) for one in received], expected)


@pytest.mark.parametrize(("n", "budget"), [(150, 40), (333, 101), (70, 16)])
def test_h2o_keeps_what_its_press_keeps(pair: Any, n: int, budget: int) -> None:
    ids = prompt(pair, n, n)
    pair.hugging_face.set_attn_implementation("eager")
    press = HeavyHitterPress(ratio(budget, n), recent=budget - budget // 2)
    check(kept_by_policy(pair, "h2o", budget, ids), press_prompt(press, pair.hugging_face, ids).layers)


QUERY_AGNOSTIC = {
    "keydiff": (KeyDiffPress, {}),
    "expected-attention": (ExpectedAttentionPress, {}),
    "expected-attention-hybrid": (ExpectedAttentionPress, {}),
}


@pytest.mark.parametrize(("n", "budget"), [(150, 40), (333, 101), (70, 16)])
def test_tova_keeps_what_its_press_keeps(pair: Any, n: int, budget: int) -> None:
    """The press keeps the last token too; it takes the mean over heads where we take the sum."""
    ids = prompt(pair, n, n)
    expected = press_prompt(TOVAPress(ratio(budget, n)), pair.hugging_face, ids).layers
    found = kept_by_policy(pair, "tova", budget, ids)
    check(found, expected)
    assert all(torch.equal(one, heads[0]) for heads in found for one in heads)


@pytest.mark.parametrize(("n", "budget"), [(150, 40), (333, 101), (70, 16), (20, 19)])
@pytest.mark.parametrize("policy", QUERY_AGNOSTIC)
def test_presses_that_need_no_question_agree(policy: str, pair: Any, n: int, budget: int) -> None:
    """The presses with their defaults: 512 positions ahead, 4 sinks, covariance, lengths of values, no epsilon."""
    ids, (press, settings) = prompt(pair, n, n), QUERY_AGNOSTIC[policy]
    expected = press_prompt(press(ratio(budget, n), **settings), pair.hugging_face, ids).layers
    check(kept_by_policy(pair, policy, budget + NEW, ids, prompt_budget=budget), expected)


@pytest.mark.parametrize(("sinks", "future"), [(0, 64), (10, 1), (1, 900)])
def test_expected_attention_with_other_settings_keeps_what_its_press_keeps(pair: Any, sinks: int, future: int) -> None:
    ids = prompt(pair, 150, sinks)
    press = ExpectedAttentionPress(ratio(40, 150), n_future_positions=future, n_sink=sinks)
    settings = {"sinks": sinks, "future_positions": future}
    found = kept_by_policy(pair, "expected-attention", 40 + NEW, ids, **settings)
    check(found, press_prompt(press, pair.hugging_face, ids).layers)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_covariance": False},
        {"use_vnorm": False},
        {"epsilon": 0.02},
        {"use_covariance": False, "use_vnorm": False},
    ],
)
def test_options_of_kvpress_expected_attention_agree(pair: Any, settings: dict[str, Any]) -> None:
    """Tries each of the press's switches, on the inputs that our decoder passes to the method; engines lack them."""
    ids, seen = prompt(pair, 120, 7), []

    def recorded(*arguments: Any) -> Any:
        seen.append(arguments[:4])
        return EXPECTED_ATTENTION.compact(*arguments)

    decoder = pair.decoder("expected-attention", 40 + NEW, 120, NEW)
    decoder.method = SimpleNamespace(compact=recorded)
    decoder.prefill(ids[None], torch.tensor([120]))
    ours = {{"use_vnorm": "use_value_norm"}.get(name, name): value for name, value in settings.items()}
    found = [keep_expected(*arguments, prompt_budget=40, sinks=4, **ours).indices[0].long() for arguments in seen]
    check(found, press_prompt(ExpectedAttentionPress(ratio(40, 120), **settings), pair.hugging_face, ids).layers)


@pytest.mark.parametrize(("n", "budget"), [(150, 40), (333, 101)])
@pytest.mark.parametrize("policy", QUERY_AGNOSTIC)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_in_double_precision_not_one_token_differs(
    policy: str, name: str, n: int, budget: int, family: Callable[..., Any], exact: Callable[[Any], Any]
) -> None:
    """Beside rounding nothing is left that could explain a difference: the bar of a near-tie is that of float64. Only
    the rotary tables are rounded to float32, in the press at every position to come, with us at the prompt's end."""
    pair = family(name)
    ids, (press, settings) = prompt(pair, n, n + 3), QUERY_AGNOSTIC[policy]
    decoder = pair.decoder(policy, budget + NEW, n, NEW, torch.float64, prompt_budget=budget)
    _, cache = decoder.prefill(ids[None], torch.tensor([n]))
    expected = press_prompt(press(ratio(budget, n), **settings), exact(pair), ids).layers
    for layer, kept in zip(cache.caches, expected, strict=True):
        assert layer.indices is not None
        assert torch.equal(layer.indices[0].long(), kept.positions)
