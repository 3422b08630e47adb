"""A model whose layers are watched while it reads: queries, keys, and the residual stream around every attention.

The reference computes it, in float32, with the whole cache. A text is read at once, or prompts are read and answered
together; causal attention gives every token the same queries and keys in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvc_trt import policies
from kvc_trt.config import BuildConfig
from kvc_trt.engine.resolution.model_choice import choose_model, open_source
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.weights import SINKS, WeightSource
from kvc_trt.policies import BASELINE
from kvc_trt.reference.layers import Weights
from kvc_trt.reference.model.caching import Projected
from kvc_trt.reference.model.decoder import ReferenceDecoder
from kvc_trt.reference.selection import gather_rows
from kvc_trt.runtime.chat.template import ChatTemplate
from kvc_trt.tasks import framing
from kvc_trt.tasks.framing import Framing
from kvc_trt.tasks.tokenizer import TaskTokenizer, load_task_tokenizer


@dataclass(frozen=True)
class AttentionLayer:
    """The attention of one layer over a text of n tokens."""

    index: int
    query: Tensor
    """[H,n,D], rotated."""
    keys: Tensor
    """[G,n,D], rotated."""

    def attention(self, first: int, last: int, keys: int) -> Tensor:
        """Attention of the queries first .. last - 1 to tokens 0 .. keys - 1: [H,last-first,keys].

        Softmax runs over all that a query sees; tokens behind it get 0.
        """
        heads, _, size = self.query.shape
        grouped = self.query[:, first:last].reshape(len(self.keys), -1, last - first, size)
        logits = grouped @ self.keys[:, None, :last].transpose(2, 3) / math.sqrt(size)
        places = torch.arange(last)
        weights = torch.softmax(logits.masked_fill(places > places[first:, None], -torch.inf), dim=-1)
        found = weights.reshape(heads, last - first, last)[..., :keys]
        return torch.nn.functional.pad(found, (0, keys - found.shape[-1]))


@dataclass(frozen=True)
class WatchedLayer(AttentionLayer):
    """One layer as it reads a text of n tokens."""

    before: Tensor
    """[n,hidden]: the residual stream in front of attention."""
    after: Tensor
    """[n,hidden]: behind it."""

    def beginning(self, tokens: int) -> WatchedLayer:
        """Return the layer as it reads the first tokens alone."""
        query, keys = self.query[:, :tokens], self.keys[:, :tokens]
        return WatchedLayer(self.index, query, keys, self.before[:tokens], self.after[:tokens])


Visit = Callable[[WatchedLayer], None]


class WatchedDecoder(ReferenceDecoder):
    """The reference with the whole cache; `watch` shows every layer of a text."""

    _projected: list[list[tuple[Tensor, Tensor]]] | None = None
    """While `projections` runs: by layer, queries and keys [N,H,D] and [N,G,D] of each call."""

    @classmethod
    def of(cls, config: ModelConfig, weights: WeightSource, longest: int) -> WatchedDecoder:
        """Return a decoder for texts of at most `longest` tokens, answers included."""
        rule = policies.resolve(
            BASELINE, model=config, token_budget=longest, max_input_len=longest - 1, max_output_len=1
        )
        return cls(config, weights, method=policies.method(rule), parameters=rule)

    @torch.inference_mode()
    def watch(self, ids: Sequence[int], visit: Visit) -> None:
        """Read a text and show each layer, one at a time."""
        hidden = self._embed(torch.tensor(ids), torch.arange(len(ids)))
        for index in range(self.config.num_hidden_layers):
            weights = self._weights.layer(index)
            row, after = self._attend_prompt(index, weights, hidden)
            visit(WatchedLayer(index, row.query.transpose(0, 1), row.keys.transpose(0, 1), hidden, after))
            hidden = self._feed_forward(index, weights, hidden, after)

    @contextmanager
    def projections(self) -> Iterator[list[list[tuple[Tensor, Tensor]]]]:
        """Collect, by layer, the queries [N,H,D] and keys [N,G,D] of all calls: prefill has one a row, a step one."""
        self._projected = [[] for _ in range(self.config.num_hidden_layers)]
        try:
            yield self._projected
        finally:
            self._projected = None

    def _project(self, index: int, weights: Weights, hidden: Tensor, positions: Tensor) -> Projected:
        row = super()._project(index, weights, hidden, positions)
        if self._projected is not None:
            self._projected[index].append((row.query, row.keys))
        return row

    def along(self, prompt: Sequence[int], following: Sequence[int], caches: Caches) -> list[Tensor]:
        """Feed `following` behind a prompt under several caches; return logits [M,vocab] of each.

        The prompt is read exactly, once for all. Logits are those of its last token and of all that follow but the
        last.
        """
        return self.branches(prompt, [Branch(len(prompt), following, caches)])[0]

    @torch.inference_mode()
    def branches(self, prompt: Sequence[int], branches: Sequence[Branch]) -> list[list[Tensor]]:
        """Do as `along` does behind several beginnings of one prompt, which is read once; return logits by branch."""
        hidden = self._embed(torch.tensor(prompt), torch.arange(len(prompt)))
        streams = [
            self._embed(torch.tensor(one.following[:-1]), one.positions).repeat(one.caches.count, 1) for one in branches
        ]
        for index in range(self.config.num_hidden_layers):
            weights = self._weights.layer(index)
            row, after = self._attend_prompt(index, weights, hidden)
            layer = WatchedLayer(index, row.query.transpose(0, 1), row.keys.transpose(0, 1), hidden, after)
            streams = [
                self._step(weights, layer, row.values, branch, stream)
                for branch, stream in zip(branches, streams, strict=True)
            ]
            hidden = self._feed_forward(index, weights, hidden, after)
        return [
            self._logits_of(one, hidden[one.prompt - 1], stream) for one, stream in zip(branches, streams, strict=True)
        ]

    def _logits_of(self, branch: Branch, last: Tensor, stream: Tensor) -> list[Tensor]:
        """Return the wanted logits of each cache, in one product: of the prompt's last token [hidden] and those behind
        it [count*M,hidden]."""
        count = branch.caches.count
        every = torch.cat([last.expand(count, 1, -1), stream.reshape(count, -1, len(last))], dim=1)
        wanted = every if branch.wanted is None else every[:, every.shape[1] - branch.wanted :]
        return list(self._logits(wanted.flatten(0, 1)).unflatten(0, (count, -1)))

    def _attend_prompt(self, index: int, weights: Weights, hidden: Tensor) -> tuple[Projected, Tensor]:
        if self.config.attention(index).window is not None or self._parts.attention_softcap or SINKS in weights:
            return super()._attend_prompt(index, weights, hidden)
        # Exact attention too, by PyTorch's own operator: in half of the time.
        row = self._project(index, weights, hidden, torch.arange(len(hidden)))
        query, keys, values = (part.transpose(0, 1)[None] for part in row[:3])
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, is_causal=True, enable_gqa=True
        )
        return row, self._after_attention(weights, hidden, attended[0].transpose(0, 1))

    def _step(self, weights: Weights, layer: WatchedLayer, values: Tensor, branch: Branch, streams: Tensor) -> Tensor:
        """Take a branch's tokens [count*M,hidden] through one layer; values [n,G,D] are the prompt's."""
        new, count, index = len(branch.positions), branch.caches.count, layer.index
        own = self._project(index, weights, streams, branch.positions.repeat(count))
        query, keys, ours = (part.reshape(count, new, *part.shape[1:]) for part in own[:3])
        layer, outputs = layer.beginning(branch.prompt), []
        tables = layer.keys, values[: branch.prompt].transpose(0, 1)
        for place, seen in enumerate(branch.caches.seen(layer, Following(query, keys))):
            old = tables if seen.kept is None else [gather_rows(one, seen.kept) for one in tables]
            both = zip(old, (keys[place], ours[place]), strict=True)
            all_keys, all_values = (torch.cat([a, b.transpose(0, 1)], 1) for a, b in both)
            read = _attend(query[place], all_keys, all_values, seen.mask)
            outputs.append(read if seen.unread is None else _with_mean(read, all_values, seen.unread))
        return self._feed_forward(index, weights, streams, self._after_attention(weights, streams, torch.cat(outputs)))


def _attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """Attention of M tokens to those of T that are `seen`: a mask [M,T], [G,M,T] by KV head, or [H,M,T].

    query [M,H,D]; keys, values [G,T,D]. Returns [M,H,D].
    """
    groups, of_group = len(keys), query.shape[1] // len(keys)
    grouped = query.transpose(0, 1).unflatten(0, (groups, of_group))
    keys, values = (one[:, None].expand(-1, of_group, -1, -1) for one in (keys, values))
    # By head [H,M,T] the mask is [G,g,M,T], by KV head [G,1,M,T]: both broadcast.
    mask = seen if seen.ndim == 2 else seen.unflatten(0, (groups, -1))
    read = torch.nn.functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return read.flatten(0, 1).transpose(0, 1)


def _with_mean(read: Tensor, values: Tensor, unread: Tensor) -> Tensor:
    """Give the mean of the values before each of M tokens its share: read [M,H,D], values [G,T,D], unread [H,M]."""
    (new, heads, _), total = read.shape, values.shape[1]
    means = values.cumsum(dim=1)[:, total - new :] / torch.arange(total - new + 1, total + 1)[:, None]
    share = unread.T[..., None]
    return (1 - share) * read + share * means.transpose(0, 1).repeat_interleave(heads // len(values), dim=1)


@dataclass(frozen=True)
class Following:
    """The tokens behind a prompt under each of several caches, as one layer reads them."""

    query: Tensor
    """[count,M,H,D], rotated."""
    keys: Tensor
    """[count,M,G,D], rotated."""

    @property
    def new(self) -> int:
        """M, the number of these tokens."""
        return self.query.shape[1]


@dataclass(frozen=True)
class Seen:
    """The part of a prompt and of themselves that M tokens behind it see."""

    mask: Tensor
    """[M,B+M], or by KV head [G,M,B+M] or by head [H,M,B+M], for B tokens of the prompt and the M."""
    kept: Tensor | None = None
    """[G,B]: the positions of these B tokens in the prompt; None if they are all."""
    unread: Tensor | None = None
    """[H,M]: the share of attention that the mean of all values gets; None if it gets none."""


class Caches(Protocol):
    """Several ways to keep and read a part of a prompt."""

    @property
    def count(self) -> int:
        """The number of caches."""

    def seen(self, layer: WatchedLayer, following: Following) -> Iterable[Seen]:
        """For each: the masks of the M tokens behind the prompt's n in a layer."""


@dataclass(frozen=True)
class Branch:
    """Tokens that are fed behind a beginning of a prompt, under several caches."""

    prompt: int
    """Tokens of the beginning."""
    following: Sequence[int]
    caches: Caches
    wanted: int | None = None
    """The number of last logits that are wanted; None if all."""

    @property
    def positions(self) -> Tensor:
        """Positions of all that follow but the last, int64 [M-1]."""
        return self.prompt + torch.arange(len(self.following) - 1)


@dataclass(frozen=True)
class Recent:
    """Each layer keeps the first `sinks` tokens and the last others of its slots, the current one among them.

    So do `streaming-llm` and, without sinks, `sliding-window`.
    """

    divisions: Sequence[Sequence[int]]
    """The slots of every layer, for each cache."""
    sinks: int

    @property
    def count(self) -> int:
        """The number of divisions."""
        return len(self.divisions)

    def seen(self, layer: WatchedLayer, following: Following) -> Iterator[Seen]:
        """Yield the masks [M,n+M]."""
        new = following.new
        total = layer.keys.shape[1] + new
        own, places = torch.arange(total - new, total)[:, None], torch.arange(total)
        for slots in self.divisions:
            recent = places > own - (slots[layer.index] - self.sinks)
            yield Seen((places <= own) & (recent | (places < self.sinks)))


@dataclass(frozen=True)
class Sampling:
    """Length and temperature of answers that are drawn."""

    tokens: int
    """Longest answer."""
    temperature: float = 0.8
    """So that a small model does not repeat itself, as it does greedily."""
    at_least: int = 1
    """Shortest answer: the model may not end it before."""


@dataclass(frozen=True)
class Answered:
    """An answer, and every layer as it read the prompt and wrote the answer."""

    tokens: list[int]
    layers: list[AttentionLayer]


@dataclass(frozen=True)
class StudyModel:
    """A model with its tokenizer and its form of a prompt."""

    name: str
    decoder: WatchedDecoder
    tokenizer: TaskTokenizer
    framing: Framing
    fingerprint: str

    def answers(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Answered]:
        """Draw an answer to each prompt, together; an end token is not part of it."""
        source = torch.Generator().manual_seed(seed)
        lengths = torch.tensor([len(one) for one in prompts])
        padded = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
        for row, one in enumerate(prompts):
            padded[row, : len(one)] = torch.tensor(one)
        ends = sorted(self.decoder.config.eos_token_ids)
        found: list[list[int]] = [[] for _ in prompts]
        going = [True] * len(prompts)
        with self.decoder.projections() as projected:
            logits, cache = self.decoder.prefill(padded, lengths)
            for place in range(sampling.tokens):
                if place < sampling.at_least:
                    logits = logits.index_fill(1, torch.tensor(ends), -torch.inf)
                chosen = torch.multinomial(torch.softmax(logits / sampling.temperature, -1), 1, generator=source)[:, 0]
                for row, token in enumerate(chosen.tolist()):
                    going[row] &= token not in ends
                    if going[row]:
                        found[row].append(token)
                if not any(going):
                    break
                logits = self.decoder.decode(chosen, cache)
        every = [_rows_of(index, calls, [len(one) for one in found]) for index, calls in enumerate(projected)]
        return [Answered(tokens, list(layers)) for tokens, layers in zip(found, zip(*every, strict=True), strict=True)]


def _rows_of(index: int, calls: Sequence[tuple[Tensor, Tensor]], answers: Sequence[int]) -> list[AttentionLayer]:
    """Return a layer's attention by row: the calls of prefill are one a row, those behind them steps of all rows."""
    prompts, steps = calls[: len(answers)], calls[len(answers) :]
    return [
        AttentionLayer(index, *(
            torch.cat([prompts[row][part], *(step[part][row, None] for step in steps[:count])]).transpose(0, 1)
            for part in range(2)
        ))
        for row, count in enumerate(answers)
    ]  # fmt: skip


def open_study_model(name: str, longest: int, checkpoint: str | None = None) -> StudyModel:
    """Open a preset or a checkpoint for texts of at most `longest` tokens.

    Prompts go through the model's chat template where it has one. InputError for an unknown model.
    """
    choice, source = open_source(choose_model(name, checkpoint), BuildConfig(model=name, checkpoint=checkpoint))
    file = next(path for path in source.tokenizer_files if path.name == "tokenizer.json")
    tokenizer, template = load_task_tokenizer(str(file)), ChatTemplate.load(file.parent)
    inner = tokenizer.tokenizer
    framed = framing.plain(inner) if template is None else framing.chat(inner, template)
    decoder = WatchedDecoder.of(choice.config, source.weights, longest)
    return StudyModel(name, decoder, tokenizer, framed, source.weights.fingerprint())
