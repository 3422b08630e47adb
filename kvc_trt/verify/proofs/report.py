"""The report of a KV proof's replay, for people and as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ProofReport:
    """The findings of a replay."""

    engine: str
    policy: str
    kind: str
    root: str
    prompt_tokens: int
    steps: int
    lists: int = 0
    """The number of digests in the proof, one for a cache's lists at one step."""
    equal: int = 0
    """The number of digests that equal those of the reference's own lists."""
    choosing: int = 0
    """The number of the reference's lists that leave out a stored token; if it is 0, nothing was compressed."""
    near_ties: int = 0
    """The number of lists (one per cache, step and head) that are proven to differ by rounding alone."""
    reproduced: int = 0
    """The number of digests that equal those of the engine's own lists, if it was run again."""
    problems: tuple[str, ...] = ()
    """The errors found."""
    differences: tuple[str, ...] = ()
    """Differences that may be rounding alone, each with the reason why the replay cannot decide."""
    other_engine: bool = False
    """True if another engine of the same weights and policy answered."""

    @property
    def passed(self) -> bool:
        """True if the proof is whole and true."""
        return not self.problems and not self.differences

    def as_text(self) -> str:
        """Return the report for people."""
        lines = [
            f"KV proof of {self.policy}: {self.prompt_tokens} prompt tokens, {self.steps} steps, root {self.root}",
            f"replayed by the reference: {self.equal} of {self.lists} {self.kind} entries equal, "
            f"{self.near_ties} lists differ at near-ties",
        ]
        if self.reproduced:
            lines.append(f"run again here, the engine itself chooses {self.reproduced} of them")
        if self.choosing:
            lines.append(f"{self.choosing} of the reference's lists leave tokens out")
        else:
            lines.append("nothing was compressed: the whole text fits the policy's budget")
        if self.other_engine:
            lines.append("another engine of the same weights and policy answered")
        lines += [f"WRONG: {problem}" for problem in self.problems]
        return "\n".join([*lines, *(f"DIFFERS: {difference}" for difference in self.differences)])

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        lists = {"problems": list(self.problems), "differences": list(self.differences)}
        return {"passed": self.passed, **asdict(self), **lists}
