"""The commands that write files, and the checks that the files they wrote are whole."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from kvc_trt.backends.opening import open_engine
from kvc_trt.cli.main import run
from kvc_trt.contexts.file import inspect_context
from kvc_trt.errors import KvcError
from tests.hostile.faults.trials import Folders

SETTINGS = ("--model", "retrieval-tiny", "--token-budget", "64", "--max-input-len", "256", "--max-output-len", "16")


@dataclass(frozen=True)
class Subject:
    """A command, its target below the folder of outputs, and what is wrong with a target (None: nothing)."""

    name: str
    arguments: Callable[[Inputs, Path], list[str]]
    target: str
    problem: Callable[[Path], str | None]
    before: Callable[[Inputs, Path], None] | None = None
    """Put something there that the command replaces."""
    refuses: Callable[[Path], bool] = lambda target: False
    """A function that returns True if the command refuses to replace the target as it is."""

    def begin(self, inputs: Inputs, folders: Folders) -> list[str]:
        """Make the folders as they are before the command, and return its arguments."""
        folders.make()
        if self.before is not None:
            self.before(inputs, folders.output / self.target)
        return self.arguments(inputs, folders.output / self.target)


@dataclass(frozen=True)
class Inputs:
    """The files that commands read."""

    engine: Path
    prompt: Path
    other_engine: Path
    other_context: Path

    @classmethod
    def make(cls, folder: Path) -> Inputs:
        """Make them, once for all trials."""
        prompt, short, context = folder / "prompt.json", folder / "short.json", folder / "context"
        prompt.write_text(json.dumps(list(range(1, 200))))
        short.write_text("[1, 2, 3]")
        engine, other = folder / "engine", folder / "other"
        for arguments in (
            ["build", *SETTINGS, "--no-verify", "-o", str(engine)],
            ["build", *SETTINGS, "--token-budget", "48", "--no-verify", "-o", str(other)],
            ["context", "save", str(engine), "--prompt-ids", str(short), "-o", str(context)],
        ):
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
                code = run(arguments)
            if code:
                raise SystemExit(f"the inputs of the trials cannot be made: {errors.getvalue()}")
        return cls(engine, prompt, other, context)


def _engine(path: Path) -> str | None:
    try:
        open_engine(path)
    except KvcError as error:
        return error.message
    return None


def _context(path: Path) -> str | None:
    try:
        inspect_context(path)
    except KvcError as error:
        return error.message
    return None


def _all_or_no_sign(sign: str, others: tuple[str, ...]) -> Callable[[Path], str | None]:
    def problem(path: Path) -> str | None:
        if not (path / sign).exists():
            return None
        missing = [name for name in others if not (path / name).stat().st_size]
        return f"{sign} stands without {missing}" if missing else None

    return problem


def _profile(path: Path) -> str | None:
    if (path / "profile.json").exists():
        json.loads((path / "profile.json").read_bytes())
    return _all_or_no_sign("profile.json", ("profile.csv", "profile.png", "report.html"))(path)


def _yaml(path: Path) -> str | None:
    return None if "max_num_tokens" in yaml.safe_load(path.read_text()) else "cut short"  # its last line


def _model(path: Path) -> str | None:
    """A model of Triton: its parts go with each other, and its engine is whole."""
    missing = [name for name in ("config.pbtxt", "1/model.py", "warmup/max_tokens") if not (path / name).is_file()]
    return f"without {missing}" if missing else _engine(path / "1" / "engine")


def _has_ensemble(target: Path) -> bool:
    return (target / "ensemble").exists()


def _ensemble(path: Path) -> str | None:
    """The models that the ensemble names are there wherever it is."""
    if not _has_ensemble(path):
        return None
    missing = [name for name in ("preprocessing", "postprocessing", "tensorrt_llm") if not (path / name).is_dir()]
    return f"the ensemble stands without {missing}" if missing else _engine(path / "tensorrt_llm" / "1" / "engine")


def _old_engine(inputs: Inputs, target: Path) -> None:
    shutil.copytree(inputs.other_engine, target)


def _old_context(inputs: Inputs, target: Path) -> None:
    target.write_bytes(inputs.other_context.read_bytes())


def _build(inputs: Inputs, target: Path) -> list[str]:
    return ["build", *SETTINGS, "--no-verify", "--force", "-o", str(target)]


def _save(inputs: Inputs, target: Path) -> list[str]:
    return ["context", "save", str(inputs.engine), "--prompt-ids", str(inputs.prompt), "--force", "-o", str(target)]


def _accuracy(inputs: Inputs, target: Path) -> list[str]:
    asked = ["--model", "retrieval-text", "--policies", "hybrid", "--budgets", "64", "--tasks", "lines"]
    few = ["--lengths", "256", "--samples", "2", "--modes", "query-aware"]
    return ["verify", "--level", "tasks", *asked, *few, "--output-dir", str(target)]


def _measure(inputs: Inputs, target: Path) -> list[str]:
    least = ["--contexts", "128", "--batch", "1", "--steps", "2", "--prefills", "1", "--decode-seconds", "0"]
    return ["profile", str(inputs.engine), *least, "-o", str(target)]


def _llm_api(inputs: Inputs, target: Path) -> list[str]:
    return ["export", "llm-api", str(inputs.engine), "--force", "-o", str(target)]


def _triton(inputs: Inputs, target: Path) -> list[str]:
    return ["export", "triton", str(inputs.engine), "--name", target.name, "-o", str(target.parent)]


def _triton_ensemble(inputs: Inputs, target: Path) -> list[str]:
    return ["export", "triton", str(inputs.engine), "--layout", "ensemble", "-o", str(target)]


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("build", _build, "engine", _engine),
        Subject("build over another", _build, "engine", _engine, _old_engine),
        Subject("context save", _save, "context", _context),
        Subject("context save over another", _save, "context", _context, _old_context),
        Subject("accuracy", _accuracy, "accuracy", _all_or_no_sign("report.html", ("accuracy.csv", "results.jsonl"))),
        Subject("profile -o", _measure, "profile", _profile),
        Subject("export llm-api", _llm_api, "llm-api.yaml", _yaml),
        Subject("export triton", _triton, "model", _model, refuses=Path.exists),
        Subject("export triton ensemble", _triton_ensemble, "models", _ensemble, refuses=_has_ensemble),
    )
}


def _run(inputs: Inputs, target: Path) -> list[str]:
    return ["run", str(inputs.engine), "--prompt-ids", str(inputs.prompt), "--max-new-tokens", "8"]


def _verify(inputs: Inputs, target: Path) -> list[str]:
    return ["verify", str(inputs.engine), "--level", "quick"]


READERS = {
    "run": Subject("run", _run, "", lambda target: None),
    "verify": Subject("verify", _verify, "", lambda target: None),
}
"""Commands that write no file."""
