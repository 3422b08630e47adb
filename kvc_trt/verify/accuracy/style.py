"""How policies look in every figure: the same colour, marker and line for one policy, whatever else is drawn."""

from __future__ import annotations

from typing import NamedTuple

from kvc_trt import policies

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555")
"""Okabe and Ito's, told apart by every kind of colour vision; without the yellow, which is pale on white."""
_MARKERS = "osD^vPX*<>hp"
_LINES = ("-", "--", ":", "-.")


class Style(NamedTuple):
    """Colour, marker and line of one policy."""

    colour: str
    marker: str
    line: str


def style_of(policy: str) -> Style:
    """By the policy's place in the registry: colours repeat after seven, but with another line and marker."""
    names = [one.name for one in policies.describe() if one.name != "full"]
    name = policy.partition(":")[0]
    place = names.index(name) if name in names else len(names)
    if ":" in policy:
        place += len(names)
    count = len(_COLOURS)
    return Style(_COLOURS[place % count], _MARKERS[place % len(_MARKERS)], _LINES[place // count % len(_LINES)])
