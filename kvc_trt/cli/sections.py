"""A command whose options stand in sections of its help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])


class SectionedOption(click.Option):
    """An option that belongs to a section of its own."""

    def __init__(self, *declarations: Any, section: str, **settings: Any) -> None:
        super().__init__(*declarations, **settings)
        self.section = section


class SectionedCommand(click.Command):
    """Options without a section come first, under "Options" as everywhere."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write every section in the order in which its first option was declared."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(context):
            record = parameter.get_help_record(context) if isinstance(parameter, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(parameter, "section", "Options"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def option(section: str, *declarations: str, **settings: Any) -> Callable[[Function], Function]:
    """`click.option` in a section."""
    return click.option(*declarations, cls=SectionedOption, section=section, **settings)
