"""A session that answers, and the policy of its caches: an engine's own, or its model under another policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvc_trt import policies
from kvc_trt.backends.registry import program_backend, runners
from kvc_trt.backends.run_options import DEFAULTS, RunOptions
from kvc_trt.config import BuildConfig, parse_settings
from kvc_trt.contexts import packing_of
from kvc_trt.engine.program import policy_program
from kvc_trt.engine.resolution.resolved_build import resolve_parameters
from kvc_trt.errors import InputError, did_you_mean
from kvc_trt.policies import BASELINE
from kvc_trt.progress import NullProgress, Progress
from kvc_trt.runtime.session.session import Session
from kvc_trt.validation import validated

if TYPE_CHECKING:
    from kvc_trt.api.engine import Engine
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.graph.state import StateTensor
    from kvc_trt.models import ModelConfig
    from kvc_trt.policies import PolicyParameters


@dataclass(frozen=True)
class Side:
    """One of two that answer the same prompts."""

    session: Session
    model: ModelConfig
    parameters: PolicyParameters
    state: Sequence[StateTensor]

    @classmethod
    def of(cls, engine: Engine) -> Side:
        """Return the engine itself."""
        return cls(engine.session(), engine.model, engine.parameters, engine.directory.state)

    @classmethod
    def under(
        cls, engine: EngineDirectory, policy: str, options: RunOptions = DEFAULTS, *, rows: int = 1,
        progress: Progress | None = None,
    ) -> Side:  # fmt: skip
        """Return the engine's model under another policy, at its token budget and lengths, with `rows` rows.

        `policy` may have settings after colons: `hybrid:page_size=16`. The weights are those of the engine's file, and
        the graphs exist in memory. InputError for a policy that has no engine of these numbers, and for an engine whose
        weights are compiled into it.
        """
        backend = program_backend()
        if backend.name not in runners(engine.backend):
            raise InputError(
                f"another policy runs on {backend.name}, and {engine.path} was built for {engine.backend}",
                hint="build that policy's engine, and give its directory",
            )
        parameters = _resolved(engine, policy)
        program = policy_program(engine.model, parameters, engine.weight_file, turns=engine.extend_graph is not None)
        runner = backend.program_runner(
            engine.path, replace(options, backend=backend.name, proofs=False), share_prefill=False
        )
        with (progress or NullProgress()).task(f"loading {policy}", None):
            executor = runner.open(program)
            executor.load()
        session = Session(
            executor,
            engine.tokenizer,
            rows,
            end_token_ids=engine.model.eos_token_ids,
            packing=packing_of(engine, program),
            progress=progress,
        )
        return cls(session, engine.model, parameters, program.state)

    @property
    def name(self) -> str:
        """The policy, and its token budget if it has one."""
        budget = self.parameters.token_budget
        return (
            self.parameters.policy
            if self._keeps_all or budget is None
            else f"{self.parameters.policy}, budget {budget:,}"
        )

    @property
    def _keeps_all(self) -> bool:
        return self.parameters.policy == BASELINE


def _resolved(engine: EngineDirectory, policy: str) -> PolicyParameters:
    """Return the policy's numbers for the engine's model and lengths."""
    name, *settings = policy.split(":")
    known = [one.name for one in policies.describe()]
    if name not in known:
        raise InputError(f"unknown policy {name!r}{did_you_mean(name, known)}", hint="kvc-trt policies lists them")
    given = {
        "model": engine.build.model,
        "policy": name,
        "token_budget": None if name == BASELINE else engine.parameters.token_budget,
        "max_input_len": engine.parameters.max_input_len,
        "max_output_len": engine.parameters.max_output_len,
        "max_conversation_len": engine.build.max_conversation_len,
        **parse_settings(settings),
    }
    config = validated(BuildConfig, {key: value for key, value in given.items() if value is not None}, policy)
    return resolve_parameters(config, engine.model)
