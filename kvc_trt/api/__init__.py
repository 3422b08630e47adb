"""The Python API of `import kvc_trt`: build, open, ask, verify and profile. The CLI is a thin layer over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvc_trt.api.engine import Engine, StrPath, as_path
from kvc_trt.api.keywords import check_fields, size
from kvc_trt.config import configured
from kvc_trt.progress import NullProgress, Progress

if TYPE_CHECKING:
    from kvc_trt.accuracy.pages.report import AccuracyReport
    from kvc_trt.tuning.result import Tuned

__all__ = ["Engine", "build", "measure_accuracy", "plan", "tune"]


def build(
    model: str | None = None,
    *,
    policy: str | None = None,
    token_budget: int | str | None = None,
    max_input_len: int | None = None,
    max_output_len: int | None = None,
    max_batch_size: int | None = None,
    checkpoint: str | None = None,
    random_weights: int | None = None,
    weights: str | None = None,
    backend: str | None = None,
    config: StrPath | None = None,
    output: StrPath | None = None,
    force: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
    **settings: Any,
) -> Engine:
    """Build an engine directory, verify it, and return it open.

    `model` is a preset's name (`kvc_trt.models.list_presets()`), a Hugging Face directory or a GGUF file. None leaves
    a setting to the model's preset, or to what the policy derives from its token budget. `settings` are the other keys
    of a build, such as page_size=8. `config` is a YAML file of settings, or an engine's config.json to build again;
    arguments win over it. `output` None is engines/MODEL-POLICY. An engine that is there already is found up to date,
    or replaced only with `force`.

    Raises InputError, UnsupportedEnvironment, and VerificationFailed for an engine that was built but is not right.

    >>> engine = build("retrieval-tiny", token_budget=64, output="engines/tiny", verify=False)
    >>> engine.parameters.policy, engine.parameters.token_budget
    ('rocketkv', 64)
    """
    from kvc_trt.building import build_configured

    named = {
        "model": model,
        "policy": policy,
        "token_budget": token_budget,
        "max_input_len": max_input_len,
        "max_output_len": max_output_len,
        "max_batch_size": max_batch_size,
        "checkpoint": checkpoint,
        "random_weights": random_weights,
        "weights": weights,
        "backend": backend,
    }
    chosen, recorded = configured(as_path(config), ("build", _given({**named, **settings})))
    progress = progress or NullProgress()
    built = build_configured(
        chosen, recorded=recorded, output=as_path(output), force=force, verify=verify, progress=progress
    )
    built.require_verified()
    return Engine(built.result.engine, progress=progress)


def plan(
    model: str | None = None,
    *,
    config: StrPath | None = None,
    compare: bool = False,
    memory: int | str | None = None,
    rows: int | None = None,
    mix: StrPath | None = None,
    gpus: Sequence[str] = (),
    **settings: Any,
) -> dict[str, Any]:
    """Predict cache size, traffic and the bandwidth floor of an engine; needs neither weights nor a GPU.

    `settings` are the keys of a build; with `compare`, every policy is shown at their budget. With `memory`, bytes that
    the caches of `rows` rows may take (a number, or "60MiB"), it is the largest budget of each policy and cache format
    that fits; with `rows` alone, of those with which that many rows fit each GPU. `mix` is a YAML file of requests
    (docs/plan.md). `gpus` are names such as "h100", or "NAME=bandwidth,TFLOPS,GiB". The result holds plain values:
    sizes in bytes, times in milliseconds. Raises InputError.

    >>> predicted = plan("llama3.1-8b", policy="rocketkv", token_budget=512)
    >>> predicted["policy"]["top_k"] < predicted["policy"]["prompt_budget"] < predicted["policy"]["max_input_len"]
    True
    >>> [table] = plan("llama3.1-8b", policy="tova", kv_cache="auto", memory=64 << 20)["tables"]
    >>> table["budgets"][0]["bytes_per_row"] <= 64 << 20
    True
    """
    from kvc_trt.profile.planning.question import PlanQuestion, answered

    given = _given({"model": model, **settings})
    question = PlanQuestion(
        tuple(gpus), compare, None if memory is None else size("memory", memory), rows, as_path(mix)
    )
    question.check(given)
    chosen, _ = configured(as_path(config), ("plan", given))
    return answered(chosen, question)


def measure_accuracy(
    model: str,
    *,
    policies: Sequence[str] | None = None,
    budgets: Sequence[int] | None = None,
    weights: str = "auto",
    checkpoint: StrPath | None = None,
    progress: Progress | None = None,
    **asked: Any,
) -> AccuracyReport:
    """Ask a model the tasks under many policies (None: all) and token budgets; no engine has to be built.

    `asked` are the fields of `kvc_trt.AccuracyRequest`: tasks, lengths, modes, samples, directory and others. Raises
    InputError, and TypeError for an unknown keyword.
    """
    from kvc_trt.accuracy.request import AccuracyRequest, measure_policies

    check_fields(asked, AccuracyRequest, "policies", "budgets", "weights", "checkpoint", "progress")
    return measure_policies(
        model,
        AccuracyRequest(**asked),
        policies=policies,
        budgets=budgets,
        weights=weights,
        checkpoint=None if checkpoint is None else str(checkpoint),
        progress=progress or NullProgress(),
    )


def tune(
    model: str,
    data: StrPath,
    memory: int | str,
    *,
    weights: str = "auto",
    checkpoint: StrPath | None = None,
    progress: Progress | None = None,
    **asked: Any,
) -> Tuned:
    """Choose a policy, its budget and a cache format for `memory` bytes of cache, by measurement on a file's prompts.

    `memory` is for all rows: a number of bytes, or a text such as "192MiB".
    `asked` are the other fields of `kvc_trt.tuning.request.TuneRequest`: rows, directory, policies, minutes and others.
    The result has `recommendation`, `good_enough`, `lines` (every candidate) and `findings()` in words; the page and
    build.yaml are in the directory. Raises InputError, and TypeError for an unknown keyword.
    """
    from kvc_trt.tuning.request import TuneRequest
    from kvc_trt.tuning.run import tune_model

    check_fields(asked, TuneRequest, "weights", "checkpoint", "progress")
    return tune_model(
        model,
        TuneRequest(data=data, memory=size("memory", memory), **asked),
        weights=weights,
        checkpoint=None if checkpoint is None else str(checkpoint),
        progress=progress or NullProgress(),
    )


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
