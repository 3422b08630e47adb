"""From a user's request to a recommendation: candidates, rounds of prompts, step times, files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvc_trt.accuracy.draw import FileDraw
from kvc_trt.accuracy.grid import CHAT, PLAIN, Variant
from kvc_trt.accuracy.questions import ModelVocabulary
from kvc_trt.accuracy.results import Results
from kvc_trt.accuracy.run import RESULTS_FILE
from kvc_trt.accuracy.under_test.model_under_test import Room
from kvc_trt.accuracy.under_test.policy_engines import ChosenModel, PolicyEngines, choose, loaded_model
from kvc_trt.backends.probes import has_torch, require_torch
from kvc_trt.errors import InputError
from kvc_trt.models.cache_formats import AUTO
from kvc_trt.profile.model_size import cache_itemsize
from kvc_trt.profile.traffic import cache_bytes
from kvc_trt.progress import Progress
from kvc_trt.sizes import readable_size
from kvc_trt.tasks.own.reader import read_data_file
from kvc_trt.tuning.candidates import Candidate, Candidates, candidates, method_names, whole_in
from kvc_trt.tuning.files import write_files
from kvc_trt.tuning.prompts import OrderedPrompts
from kvc_trt.tuning.request import TuneRequest
from kvc_trt.tuning.result import Tuned
from kvc_trt.tuning.rounds import Standing, ask, groups_of, known
from kvc_trt.tuning.step_times import StepTimes, floor_times, measured_times


def tune_model(
    model: str, asked: TuneRequest, *, weights: str = "auto", checkpoint: str | None = None, progress: Progress
) -> Tuned:
    """Measure candidates on a file's prompts and choose one; the files are in the request's directory.

    That no candidate is good enough is in the result, not raised. InputError for a request that cannot be right, and
    where no candidate fits the memory.
    """
    started = time.monotonic()
    asked.check()
    names = method_names(asked.policies, asked.formats, measures_layers=has_torch())
    if not has_torch() and any(Variant(name, None).settings.get("layer_budget") == "squeeze" for name in names):
        require_torch("leave layer_budget=squeeze out of --policies", what="layer_budget=squeeze needs PyTorch")
    draw = FileDraw(read_data_file(asked.data), asked.samples, asked.max_new_tokens, asked.truncate)
    prompts = OrderedPrompts.of(draw, asked.sets, asked.seed)
    chosen = choose(model, checkpoint=checkpoint, weights=weights)
    framing = asked.framing or (PLAIN if chosen.template is None else CHAT)
    vocabulary = ModelVocabulary(chosen.tokenizer, chosen.config.vocab_size, chosen.template)
    if vocabulary.tokenizer is None:
        raise InputError(f"{asked.data} is text, and the model has no tokenizer")
    length = prompts.length(vocabulary, framing, chosen.config.max_position_embeddings, progress)
    room = Room(length - prompts.room, prompts.room)
    found = _fitting(chosen, names, room, asked)
    groups = groups_of(prompts, length, framing)
    settings = {**chosen.describe(), **prompts.settings(), "framing": framing, "seed": asked.seed}
    run = _Run(asked, chosen, room, settings, found, started)
    directory = Path(asked.directory)
    with Results(directory / RESULTS_FILE, settings) as results, loaded_model(chosen, progress=progress) as engines:
        times = run.times(engines, found.fitting, progress) if asked.max_step_ms is not None else None
        quick = run.quick_enough(found.fitting, times)
        state = known(prompts, quick, groups, results)
        until = None if asked.minutes is None else started + 60 * asked.minutes

        def after_round(now: Standing) -> None:
            nonlocal state
            state = now
            run.write(now, times)

        run.write(state, times)  # there is a page from the start, whenever and however the process ends
        try:
            state = ask(engines, state, results, progress, until=until, after_round=after_round)
            if times is None:
                finalists = state.finalists
                shown = list(finalists.by_name) if finalists is not None else list(state.left)
                times = run.times(engines, shown, progress)
        except (KeyboardInterrupt, SystemExit):
            run.write(state, times)  # judging the rounds again could take longer than a stopped process has
            raise
    return run.write(state, times)


@dataclass(frozen=True)
class _Run:
    """One run, and the values that all its results share."""

    asked: TuneRequest
    chosen: ChosenModel
    room: Room
    settings: dict[str, object]
    found: Candidates
    started: float

    def times(self, engines: PolicyEngines, some: Sequence[Candidate], progress: Progress) -> StepTimes:
        if self.asked.gpu is not None:
            return floor_times(self.chosen, some, self.room, self.asked.rows, self.asked.gpu)
        return measured_times(engines, some, self.room, self.asked.rows, Path(self.asked.directory), progress)

    def quick_enough(self, some: Sequence[Candidate], times: StepTimes | None) -> list[Candidate]:
        """The candidates whose step takes no longer than asked for. InputError where there is none."""
        limit = self.asked.max_step_ms
        if limit is None or times is None:
            return list(some)
        quick = [one for one in some if 1e3 * times.seconds[one] <= limit]
        if not quick:
            least = min(some, key=lambda one: times.seconds[one])
            raise InputError(
                f"no step takes at most {limit:g} ms: the quickest, {least}, takes "
                f"{1e3 * times.seconds[least]:.3g} ms ({times.how})",
                hint="a larger --max-step-ms, or fewer --rows",
            )
        return quick

    def write(self, state: Standing, times: StepTimes | None) -> Tuned:
        """Write the files of the results so far; return these results."""
        tuned = Tuned(self.asked, self.chosen, self.room, self.settings, self.found, state, times,
                      time.monotonic() - self.started)  # fmt: skip
        write_files(tuned, Path(self.asked.directory))
        return tuned


def _fitting(chosen: ChosenModel, names: Sequence[str], room: Room, asked: TuneRequest) -> Candidates:
    """The candidates by `plan`'s bytes. InputError where nothing fits: it names the bytes of the smallest."""
    itemsize = cache_itemsize(chosen.weights)

    def row_bytes(variant: Variant) -> int:
        parameters = chosen.resolved(variant, room).parameters
        return cache_bytes(chosen.config, parameters, itemsize, turns=parameters.no_turn is None).total

    forms = {Variant(name, None).settings.get("kv_cache", AUTO) for name in names}
    whole = min(row_bytes(whole_in(form)) for form in forms)
    token = whole / (room.max_input_len + room.max_output_len)
    limit = asked.row_limit
    each = f"{readable_size(asked.memory)} for {asked.rows} rows are {readable_size(limit)} for each"
    if limit < token:
        raise InputError(
            f"{each}, less than the {readable_size(token)} of one token", hint="more --memory, or fewer --rows"
        )
    found = candidates(names, row_bytes, limit, room.max_input_len)
    if not found.fitting:
        if (least := found.too_large) is not None:
            why = f"the smallest, {least}, takes {readable_size(least.row_bytes)}"
        else:
            why = ": ".join(next(iter(found.refused.items())))
        raise InputError(f"no candidate fits: {each}; {why}", hint="more --memory, fewer --rows, or other --policies")
    return found
