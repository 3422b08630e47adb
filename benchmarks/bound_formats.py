"""The cost of narrower page bounds: the tokens that a step reads, and the share of attention that they hold.

    kvc-trt build --model smollm2-135m-instruct --policy hybrid --token-budget 256 --max-input-len 4096 \\
        --max-output-len 64 --weights fp32 --no-verify -o engines/bounds
    python -m benchmarks.bound_formats engines/bounds              # two minutes

The reference reads some pages of this project's documentation and steps through others. At every step, layer and KV
head, the lists under each format of the bounds are compared with those under exact ones. Attention is that of the
group's queries to all entries, on average over its heads. Nothing is timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine, store
from kvc_trt.backends.opening import open_engine
from kvc_trt.engine import EngineDirectory
from kvc_trt.graph.weights import EngineWeights
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.registry import method
from kvc_trt.methods.hybrid import BestOfPages
from kvc_trt.reference import LayerCache, Selection, page_bounds
from kvc_trt.reference.bounds import rounded_outward
from kvc_trt.reference.methods.hybrid import row_scores
from kvc_trt.reference.model.decoder import ReferenceDecoder

TEXT = ("docs/guide.md", "docs/serving-dynamo.md")
FOLLOWING = "docs/tensorrt.md"
BEST = "the most attended tokens"
"""The tokens that no bounds could beat."""
Bounds = tuple[Tensor, Tensor]
Found = dict[str, list[tuple[Tensor, Tensor]]]
"""By format, for every step and layer: shares [G] of the tokens that exact bounds read too, and of attention."""


def e4m3_outward(low: Tensor, high: Tensor) -> Bounds:
    """Rounded outward to three bits of mantissa; values beyond 448 are cut, so that their bounds promise less."""

    def up(values: Tensor) -> Tensor:
        wide = values.double().clamp(-448, 448)
        _, exponents = torch.frexp(wide)
        steps = torch.ldexp(torch.ones_like(wide), exponents.clamp(min=-5) - 4)
        return (torch.ceil(wide / steps) * steps).to(values.dtype)

    return -up(-low), up(high)


def nearest(values: Tensor) -> Tensor:
    """Rounded to E5M2: a bound may promise less than a page holds."""
    return values.to(torch.float8_e5m2).to(values.dtype)


FORMATS: Mapping[str, Callable[[Tensor, Tensor], Bounds]] = {
    "exact": lambda low, high: (low, high),
    "E5M2, outward": rounded_outward,
    "E5M2, nearest": lambda low, high: (nearest(low), nearest(high)),
    "E4M3, outward": e4m3_outward,
}


class Watching(BestOfPages):
    """The selection, which also compares the pages that each format would read."""

    def __init__(self, found: Found) -> None:
        self.found = found

    def select(self, query: Tensor, cache: LayerCache, rule: PolicyParameters) -> Selection:  # type: ignore[override]
        """Run one step; only the first row counts."""
        stored = int(cache.lengths[0])
        keys = cache.keys[:1, :, :stored]
        exact = page_bounds(keys, torch.tensor([stored]), rule.page_size)
        queries = query[0].reshape(keys.shape[1], -1, keys.shape[3])
        attention = torch.softmax(queries @ keys[0].transpose(1, 2) / keys.shape[3] ** 0.5, dim=-1).mean(1)
        read: Tensor | None = None
        for name, rounded in FORMATS.items():
            scores = row_scores(query[0], stored, *(b[0] for b in rounded(*exact)), page_size=rule.page_size,
                                top_r=rule.top_r).tokens  # fmt: skip
            taken = chosen(scores, rule.top_k)
            read = taken if read is None else read  # exact bounds come first
            self._note(name, taken, read, attention)
        assert read is not None
        self._note(BEST, chosen(attention, rule.top_k), read, attention)
        return super().select(query, cache, rule)

    def _note(self, name: str, taken: Tensor, read: Tensor, attention: Tensor) -> None:
        shares = (taken & read).sum(1) / taken.sum(1), (attention * taken).sum(1)
        self.found.setdefault(name, []).append(shares)


def chosen(scores: Tensor, count: int) -> Tensor:
    """Mark the `count` best of each row, the lower index among equals."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True)


def watched(engine: EngineDirectory, prompt: int, steps: int) -> Found:
    """Read a prompt of `prompt` tokens and step through `steps` more."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None

    def ids(*paths: str) -> list[int]:
        return tokenizer.encode("".join((machine.ROOT / path).read_text(encoding="utf-8") for path in paths)).ids

    found: Found = {}
    rule = engine.parameters
    watching = replace(method(rule), selection=Watching(found))
    decoder = ReferenceDecoder(engine.model, EngineWeights(engine.weight_file), method=watching, parameters=rule)
    with torch.inference_mode():
        _, cache = decoder.prefill(torch.tensor([ids(*TEXT)[:prompt]]), torch.tensor([prompt]))
        for token in ids(FOLLOWING)[:steps]:
            decoder.decode(torch.tensor([token]), cache)
    return found


def summary(found: Found) -> list[dict[str, Any]]:
    """One entry for each format."""
    entries = []
    for name, shares in found.items():
        same, attention = (torch.stack(part).flatten() for part in zip(*shares, strict=True))
        entries.append({
            "bounds": name,
            "lists": len(same),
            "tokens_as_exact": round(float(same.mean()), 4),
            "tokens_as_exact_5th_percentile": round(float(same.quantile(0.05)), 4),
            "attention_read": round(float(attention.mean()), 4),
        })  # fmt: skip
    return entries


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path, help="of a policy that selects pages, with a tokenizer")
    parser.add_argument("--prompt", type=int, default=3600, help="tokens")
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args(arguments)
    engine, record = open_engine(options.engine), machine.record()
    entries = summary(watched(engine, options.prompt, options.steps))
    rule = engine.parameters
    pages = {"page_size": rule.page_size, "top_r": rule.top_r, "top_k": rule.top_k}
    run = {
        "model": engine.build.model,
        "policy": rule.policy,
        **pages,
        "prompt": options.prompt,
        "steps": options.steps,
    }
    store.write_result("bound_formats", {"machine": record, "run": run, "formats": entries})
    for entry in entries:
        same, worst = (f"{100 * entry[name]:5.1f} %" for name in ("tokens_as_exact", "tokens_as_exact_5th_percentile"))
        attention = f"{100 * entry['attention_read']:5.1f} %"
        print(f"{entry['bounds']:26} tokens as exact {same} (5th percentile {worst}), attention {attention}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
