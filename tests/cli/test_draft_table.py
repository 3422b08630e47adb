"""The policies that check drafts follow from the methods: the page shows the command's table."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from kvc_trt.cli.commands.policies import command

PAGE = Path(__file__).resolve().parents[2] / "docs" / "speculation.md"


def test_the_page_has_the_draft_table_of_the_command() -> None:
    printed = CliRunner().invoke(command, ["--drafts"]).output
    assert printed.count("\n") == 5
    assert printed in PAGE.read_text(), "the page is out of date: `kvc-trt policies --drafts`"
