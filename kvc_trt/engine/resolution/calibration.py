"""Layer budgets that a build measures once on calibration prompts: how much each layer changes the residual stream.

SqueezeAttention (arXiv 2404.04793) sets budgets for each prompt; an engine with caches of fixed sizes uses the mean
over prompts like those it will serve. Which layers matter depends on the task, so give prompts of your own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvc_trt import policies
from kvc_trt.engine.resolution.resolved_build import check_cosines
from kvc_trt.errors import InputError, describe
from kvc_trt.files.inputs import read_text_input
from kvc_trt.methods.base.layer_budget import DEFAULT_SHARE, largest_budget, smallest_budget, uniform_budget
from kvc_trt.models.rope import longest_alike
from kvc_trt.reference.model.squeeze import squeeze
from kvc_trt.runtime.session.batch import batch_of
from kvc_trt.tasks.registry import task
from kvc_trt.tasks.tokenizer import load_task_tokenizer

if TYPE_CHECKING:
    from kvc_trt.engine.resolution.model_choice import ModelSource
    from kvc_trt.engine.resolution.resolved_build import ResolvedBuild
    from kvc_trt.progress import Progress
    from kvc_trt.tasks.tokenizer import TaskTokenizer

TASKS = ("passkey", "lines")
SEEDS = (0, 1)
LONGEST, ANSWER = 1024, 16
"""Tokens of a calibration prompt and of its answer."""
LARGEST_CALIBRATION = 64 << 20
"""Bytes of a file of calibration prompts."""
_ONE_PER_LINE = "--set calibration=FILE, one prompt per line"


Cosines = dict[str, list[float]]
"""The mean cosine of every layer, which policies do not change, by rotary tables and the prompts of the measurement."""


def calibrated(
    resolved: ResolvedBuild, source: ModelSource, progress: Progress, *, known: Cosines | None = None
) -> ResolvedBuild:
    """Return `resolved` with its layer budgets, measured on the reference unless they are already recorded.

    Recorded cosines without budgets are divided anew. `known` holds earlier measurements of the same model, and
    receives the new ones. Raises InputError for layer budgets without prompts to measure on, for prompts without layer
    budgets, and for cosines of another number of layers.
    """
    config = resolved.config
    if config.calibration is not None and config.layer_budget != "squeeze":
        raise InputError("calibration has no use without --layer-budget squeeze", hint="--layer-budget squeeze")
    check_cosines(config, resolved.model)
    if config.layer_budget != "squeeze" or config.layer_budgets is not None:
        return resolved
    cosines = config.layer_cosines
    if cosines is None:
        prompts = _prompts(resolved, source)
        cosines = measure(resolved, source, prompts, progress, known={} if known is None else known)
    budgets = divide(resolved, cosines, progress)
    return resolved.changed(config.model_copy(update={"layer_budgets": budgets, "layer_cosines": cosines}))


def measure(
    resolved: ResolvedBuild, source: ModelSource, prompts: list[list[int]], progress: Progress, *, known: Cosines
) -> list[float]:
    """Return the mean cosines of all layers over `prompts`; weights are read once, layer by layer."""
    key = f"{longest_alike(resolved.model, resolved.parameters.max_sequence_len)} {prompts}"
    if key not in known:
        known[key] = _cosines(resolved, source, prompts, progress)
    return known[key]


def divide(resolved: ResolvedBuild, cosines: Sequence[float], progress: Progress) -> list[int]:
    """Return the budgets of all layers by their cosines; layers that the policy skips take no part."""
    rule = resolved.parameters
    found = squeeze(
        cosines[rule.skip_layers :],
        uniform_budget(rule),
        share=resolved.config.squeeze_share or DEFAULT_SHARE,
        minimum=min(smallest_budget(rule), uniform_budget(rule)),
        maximum=largest_budget(rule),
    )
    if found.unplaced:
        progress.note(f"layer budgets: {found.unplaced} tokens found no layer with room")
    return [uniform_budget(rule)] * rule.skip_layers + list(found.budgets)


def _cosines(resolved: ResolvedBuild, source: ModelSource, prompts: list[list[int]], progress: Progress) -> list[float]:
    import torch

    from kvc_trt.reference.model.decoder import ReferenceDecoder

    rule = resolved.parameters
    decoder = ReferenceDecoder(
        resolved.model, source.weights, method=policies.method(rule), parameters=rule, resident=False
    )
    batch = batch_of(prompts)
    with progress.task(f"layer budgets: {len(prompts)} calibration prompts", None):
        cosines = decoder.layer_cosines(torch.from_numpy(batch.input_ids), torch.from_numpy(batch.prompt_lengths))
    found: list[float] = cosines.mean(dim=1).tolist()
    return found


def _prompts(resolved: ResolvedBuild, source: ModelSource) -> list[list[int]]:
    """Return the token ids of the calibration file's lines, or of a few task prompts that the tokenizer can spell."""
    tokenizer = _tokenizer(source)
    if resolved.config.calibration is not None:
        return _of_file(Path(resolved.config.calibration), tokenizer, resolved.parameters.max_input_len)
    length = min(LONGEST, resolved.parameters.max_input_len)
    found = _of_tasks(tokenizer, length)
    if not found:
        raise InputError(
            "the model's tokenizer cannot spell any of the tasks; layer budgets need calibration prompts",
            hint=_ONE_PER_LINE,
        )
    return found


def _of_file(path: Path, tokenizer: TaskTokenizer, longest: int) -> list[list[int]]:
    lines = read_text_input(path, LARGEST_CALIBRATION, hint=_ONE_PER_LINE).splitlines()
    for number, line in enumerate(lines, start=1):
        if (word := tokenizer.unknown_word(line)) is not None:
            where = f"calibration: {path}, line {number}"
            raise InputError(
                f"{where}: {describe(word)} is an unknown token of the model's tokenizer",
                hint="give prompts in the model's vocabulary",
            )
    prompts = [tokenizer.encode(line)[:longest] for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"calibration: {path} has no prompts, expected one per line")
    return prompts


def _of_tasks(tokenizer: TaskTokenizer, length: int) -> list[list[int]]:
    prompts = []
    for name in TASKS:
        for seed in SEEDS:
            try:
                sample = task(name).sample(
                    seed=seed, index=0, target_tokens=length, encode=tokenizer.encode, max_new_tokens=ANSWER
                )
                tokenizer.check_spelling(sample)
            except InputError:
                continue
            prompts.append(tokenizer.encode(sample.prompt))
    return prompts


def _tokenizer(source: ModelSource) -> TaskTokenizer:
    path = next((path for path in source.tokenizer_files if path.name == "tokenizer.json"), None)
    if path is None:
        raise InputError(
            "layer budgets are measured on prompts, and the model has no tokenizer",
            hint="--set layer_budgets=[...], one number per layer",
        )
    return load_task_tokenizer(str(path))
