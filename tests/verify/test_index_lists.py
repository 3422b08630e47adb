"""Lists of every ranking but RocketKV's: swapped near-ties are proven, other swaps and broken rules are refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvc_trt import policies
from kvc_trt.methods.hybrid import ChannelChoice, channel_choices, page_scores
from kvc_trt.methods.rankings.ranking import Prompts, Step
from kvc_trt.reference.methods.sparq import row_scores
from kvc_trt.verify.rankings.index_lists import judge_kept, judge_read
from tests.small_model import SMALL

SLACK = 32.0
TOKENS = 60


def rule_of(policy: str) -> Any:
    pages = {"page_size": 4, "top_r": 3}
    changes = {"quest": {"skip_layers": 0, "page_size": 4}, "sparq": {"top_r": 3}, "hybrid": pages}.get(policy, {})
    sizes = {"token_budget": 16, "max_input_len": 64, "max_output_len": 4}
    return policies.resolve(policy, model=SMALL, **sizes, **changes)


def tables(rule: Any, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Queries [1,H,S,D], keys and values [1,G,S,D] with room for `max_sequence_len` tokens, float32."""
    rng = np.random.default_rng(seed)
    heads, kv_heads, size = SMALL.num_attention_heads, SMALL.num_key_value_heads, SMALL.head_size
    shapes = ((1, heads, rule.max_sequence_len, size), *((1, kv_heads, rule.max_sequence_len, size),) * 2)
    return tuple(torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for shape in shapes)


class Kept:
    """One prompt, and the tokens that the reference keeps of it."""

    did = "kept"

    def __init__(self, policy: str, seed: int = 0) -> None:
        self.rule = rule_of(policy)
        queries, self.keys, self.values = tables(self.rule, seed)
        self.lengths = torch.tensor([TOKENS])
        self.observed: Any = queries[:, :, :1]
        if policy.startswith("expected"):
            rng = np.random.default_rng(seed)
            spread = rng.standard_normal((1, SMALL.num_attention_heads, 9, SMALL.head_size)).astype(np.float32)
            self.observed = torch.from_numpy(spread.mean(2)), torch.from_numpy(spread.swapaxes(2, 3) @ spread / 9)
        self.own = self.choose()

    def choose(self) -> torch.Tensor:
        return self.rule.eviction.compact(self.observed, self.keys, self.values, self.lengths, self.rule).indices

    def judged(self, lists: np.ndarray, slack: float = SLACK) -> Any:
        prompts = Prompts.of_tensors(self.observed, self.keys, self.values, self.lengths)
        return judge_kept(self.rule.eviction.ranking(self.rule), prompts, self.own.numpy(), lists, slack)


class Read:
    """One step, and the tokens that the reference reads in it."""

    did = "read"

    def __init__(self, policy: str, seed: int = 0) -> None:
        self.rule = rule_of(policy)
        queries, self.keys, self.values = tables(self.rule, seed)
        self.query, self.lengths = queries[:, :, 0].contiguous(), torch.tensor([TOKENS])
        self.own = self.choose()

    def choose(self) -> torch.Tensor:
        cache = self.rule.selection.layer_cache(self.keys, self.values, self.lengths, self.rule)
        return self.rule.selection.select(self.query, cache, self.rule).selected

    def judged(self, lists: np.ndarray, slack: float = SLACK) -> Any:
        return self.judged_and_scored(lists, slack)[0]

    def judged_and_scored(self, lists: np.ndarray, slack: float = SLACK) -> Any:
        """Return the verdict, and what the ranking says that the lists were scored by."""
        ranking, step = self.rule.selection.ranking(self.rule), Step.of_tensors(self.query, self.keys, self.lengths)
        found, explained = judge_read(ranking, step, self.own.numpy(), lists, slack)
        return found, ranking.scored_by(step, explained, slack)


def with_list(own: torch.Tensor, tokens: Any) -> np.ndarray:
    """Return the lists with another one of head 0."""
    lists = own.numpy().copy()
    lists[0, 0] = -1
    lists[0, 0, : len(tokens)] = np.sort(np.asarray(tokens))
    return lists


def of_head(own: torch.Tensor) -> np.ndarray:
    return own[0, 0][own[0, 0] >= 0].numpy()


def swaps(own: torch.Tensor, first: int, last: int, unit: int) -> Iterator[np.ndarray]:
    """Yield every list with one unit of tokens from `first` to `last` in place of another one."""
    taken = of_head(own)
    inside = {int(token) // unit for token in taken if first <= token < last}
    for out in sorted(inside):
        kept = [token for token in taken if token // unit != out]
        for into in sorted(set(range(first // unit, last // unit)) - inside):
            yield with_list(own, [*kept, *range(into * unit, (into + 1) * unit)])


CASES = [(Kept, "keydiff", 0, TOKENS, 1), (Kept, "expected-attention", 4, TOKENS, 1), (Read, "sparq", 0, TOKENS - 1, 1),
         (Read, "quest", 0, TOKENS - 4, 4), (Read, "hybrid", 0, TOKENS, 4)]  # fmt: skip


@pytest.mark.parametrize(("make", "policy", "first", "last", "unit"), CASES)
def test_a_swap_of_scores_that_differ_is_refused(make, policy, first, last, unit):
    judge = make(policy)
    own = judge.judged(judge.own.numpy())
    assert (own.near_ties, own.wrong) == (0, ())
    lists = list(swaps(judge.own, first, last, unit))
    found = [judge.judged(other) for other in lists]
    assert len(found) > 20
    refused = [one.wrong[0] for one in found if one.wrong]
    assert len(refused) > 0.9 * len(found)
    assert all(f"row 0, KV head 0: {judge.did} [" in one and "float64 scores differ by" in one for one in refused)
    wide = [judge.judged(other, 1e9) for other in lists]
    assert all((one.near_ties, one.wrong) == (1, ()) for one in wide)


@pytest.mark.parametrize(("make", "policy", "first", "last", "unit"), CASES)
@pytest.mark.parametrize("seed", range(3))
def test_swaps_within_rounding_are_near_ties(make, policy, first, last, unit, seed):
    """The last taken token gets a neighbour whose score differs in the last bits only: either may be taken."""
    before = make(policy, seed)
    inside = {int(token) // unit for token in of_head(before.own) if first <= token < last}
    outside = sorted(set(range(first // unit, last // unit)) - inside)
    for out, into in itertools.product(sorted(inside), outside):
        judge = make(policy, seed)
        for table in (judge.keys, judge.values):
            table[0, 0, into * unit : (into + 1) * unit] = table[0, 0, out * unit : (out + 1) * unit] * (1 + 2.0**-22)
        judge.own = judge.choose()
        taken = of_head(judge.own)
        here = {int(token) // unit for token in taken}
        if (out in here) != (into in here):
            gone, come = (out, into) if out in here else (into, out)
            kept = [token for token in taken if token // unit != gone]
            found = judge.judged(with_list(judge.own, [*kept, *range(come * unit, (come + 1) * unit)]))
            assert (found.near_ties, found.wrong) == (1, ())
            return
    pytest.fail("none of them is the last one that is taken")


def test_lists_that_break_a_rule_are_refused_whatever_the_slack():
    kept, read, pages = Kept("expected-attention"), Read("sparq"), Read("quest")
    sinks = kept.rule.sinks
    others = np.setdiff1d(np.arange(sinks, TOKENS), of_head(kept.own))
    without_sink = with_list(kept.own, [*of_head(kept.own)[1:], others[0]])
    assert f"the first {sinks} tokens must be kept, 0 is not" in kept.judged(without_sink, 1e9).wrong[0]

    others = np.setdiff1d(np.arange(TOKENS), of_head(read.own))
    without_current = with_list(read.own, [*of_head(read.own)[:-1], others[0]])
    assert f"the current token, {TOKENS - 1}, must be read" in read.judged(without_current, 1e9).wrong[0]

    taken = of_head(pages.own)
    other = np.setdiff1d(np.arange(TOKENS - 4), taken)
    torn = with_list(pages.own, [*taken[1:], other[0]])
    assert "is not read whole" in pages.judged(torn, 1e9).wrong[0]
    older = with_list(pages.own, [*taken[:-4], *other[:4]])
    assert "the newest page, 14, must be read" in pages.judged(older, 1e9).wrong[0]

    best = Read("hybrid")
    taken = of_head(best.own)
    other = np.setdiff1d(np.arange(TOKENS), taken)
    not_lowest = with_list(best.own, [*taken[1:], other[0]])
    assert "did not give its lowest tokens" in best.judged(not_lowest, 1e9).wrong[0]


@pytest.mark.parametrize(("make", "policy"), [(make, policy) for make, policy, *_ in CASES])
def test_tokens_beyond_the_last_one_are_refused(make, policy):
    judge = make(policy)
    beyond = with_list(judge.own, [*of_head(judge.own)[:-1], TOKENS + 1])
    assert f"of {'a prompt of ' if make is Kept else ''}{TOKENS}" in judge.judged(beyond, 1e9).wrong[0]


def test_tied_channels_are_followed():
    """The channels 2 and 5 weigh the same to one part in 10^7: a list by either is explained, and says by which."""
    read = Read("sparq")
    query = torch.full_like(read.query, 0.1)
    query[:, :, [0, 1]] = 9.0
    query[:, :, 2], query[:, :, 5] = 5.0, 5.0000005
    query[:, 0, 0] = 9.5  # heads of the group differ, so that channels 2 and 5 are no copies in all of them
    read.query = query
    read.own = read.choose()
    for channels, other in (([0, 1, 2], 2), ([0, 1, 5], 5)):
        by = torch.tensor([channels] * SMALL.num_key_value_heads)
        scored = row_scores(query[0], read.keys[0, :, :TOKENS], top_r=3, channels=by).tokens[0].clone()
        scored[TOKENS - 1] = torch.inf
        best = scored.sort(descending=True).indices[: read.rule.top_k + 1]
        lists = with_list(read.own, best.numpy())
        found, used = read.judged_and_scored(lists)
        assert found.wrong == ()
        assert other in used[0, 0].tolist()
    query[:, :, 5] = 4.0
    read.own = read.choose()
    assert read.judged(lists).wrong


HALF = 4096.0
"""The slack of fp16."""


def test_pages_by_channels_that_fp16_may_swap_are_followed():
    """Two small channels beside large ones: they differ by more than 2^-8 of their weight, and fp16 may swap them."""
    read = Read("hybrid")
    query = torch.full_like(read.query, 0.1)
    query[:, :, [0, 1]] = 9.0
    query[:, :, 2], query[:, :, 5] = 1.0, 0.99
    read.query, pages = query, read.rule.page_size
    read.keys[..., [0, 1]] = 1.0
    read.own = read.choose()
    lists = {}
    for channel in (2, 5, 6):
        choice = ChannelChoice(np.array([0, 1, channel]), np.ones(3, bool))
        of_head_0 = query[0, : query.shape[1] // read.keys.shape[1]].double().numpy()
        weight = page_scores(of_head_0, read.keys[0, 0, :TOKENS].double().numpy(), pages, choice).token_weight
        order = np.lexsort((np.arange(TOKENS), -np.repeat(weight, pages)[:TOKENS]))
        lists[channel] = with_list(read.own, order[: read.rule.top_k])
    assert len({one.tobytes() for one in lists.values()}) == 3, "other channels do not choose other pages"
    assert read.judged(lists[2], HALF).wrong == ()
    assert (read.judged(lists[5], HALF).near_ties, read.judged(lists[5], HALF).wrong) == (1, ())
    assert read.judged(lists[6], HALF).wrong
    assert read.judged(lists[5], SLACK).wrong


@pytest.mark.parametrize("seed", range(4))
def test_wrong_pages_are_refused_within_the_slack_of_fp16(seed):
    """Lists by fewer channels, by the other bound of each page, by keys of another head, and without the best page."""
    read = Read("hybrid", seed)
    grouped, keys, pages = read.query[0].reshape(2, 2, -1).double().numpy()[0], read.keys[0].double().numpy(), 4
    right = next(channel_choices(grouped, 3))

    def chosen(choice: ChannelChoice, keys: np.ndarray, but_first: int = 0) -> np.ndarray:
        weight = np.repeat(page_scores(grouped, keys[:TOKENS], pages, choice).token_weight, pages)[:TOKENS]
        order = np.lexsort((np.arange(TOKENS), -weight))
        return with_list(read.own, order[but_first : but_first + read.rule.top_k])

    assert np.array_equal(chosen(right, keys[0]), read.own.numpy())
    wrong = {
        "one channel": chosen(ChannelChoice(right.channels[:1], right.take_maximum[:1]), keys[0]),
        "the other bounds": chosen(ChannelChoice(right.channels, ~right.take_maximum), keys[0]),
        "another head's keys": chosen(right, keys[1]),
        "not the best page": chosen(right, keys[0], but_first=pages),
    }
    for what, lists in wrong.items():
        if not np.array_equal(lists, read.own.numpy()):
            assert read.judged(lists, HALF).wrong, what
