"""Every input that `make fuzz` ever found to be bad, as small as it could make it; `--keep` puts new ones here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.campaign import REGRESSIONS
from tests.fuzz.kind import Kind, kinds
from tests.fuzz.minimise import verdict_key_in_child
from tests.fuzz.verdict import judge

FILES = sorted(path for path in REGRESSIONS.glob("*/*") if path.is_file())


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory):
    """The kind of a name, prepared once."""
    known: dict[str, Kind] = {}

    def kind(name: str) -> Kind:
        if name not in known:
            folder = tmp_path_factory.getbasetemp() / "fuzz" / name
            folder.mkdir(parents=True, exist_ok=True)
            known[name] = kinds()[name](folder)
            if not known[name].seeds():
                pytest.skip(str(known[name].needs))
        return known[name]

    return kind


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_former_defect_is_accepted_or_refused_in_one_line(path: Path, made) -> None:
    kind, content = made(path.parent.name), path.read_bytes()
    if kind.native:  # it may end the process
        assert verdict_key_in_child(kind, content) == ""
    else:
        verdict = judge(kind, content)
        assert verdict.kind != "bad", f"{verdict.key}: {verdict.message}"
