"""How policies look in every figure: the same colour, marker and line for one policy, whatever else is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from kvc_trt import policies

CHOOSES, DROPS = "choose what a step reads", "drop what no step will read again"
"""The two kinds of policies; those that do both are drawn with the first."""
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555")
"""Okabe and Ito's, told apart by every kind of colour vision; without the yellow, which is pale on white."""
_MARKERS = "osD^vPX*<>hp"
_LINES = ("-", "--", ":", "-.")
_CHOOSING = ("hybrid", "quest", "sparq", "exact-topk")


class Style(NamedTuple):
    """Colour, marker and line of one policy."""

    colour: str
    marker: str
    line: str


def kind_of(policy: str) -> str:
    """CHOOSES or DROPS; a policy that the registry does not know drops."""
    selection = {one.name: one.decode_selection for one in policies.describe()}.get(policy.partition(":")[0], "")
    return CHOOSES if selection in _CHOOSING else DROPS


def style_of(policy: str) -> Style:
    """By the policy's place among those of its kind: colours repeat after seven, with another line and marker."""
    place = _places().get(policy.partition(":")[0], 0) + (len(_COLOURS) + 3 if ":" in policy else 0)
    count = len(_COLOURS)
    return Style(_COLOURS[place % count], _MARKERS[place % len(_MARKERS)], _LINES[place // count % len(_LINES)])


@cache
def _places() -> Mapping[str, int]:
    names = [one.name for one in policies.describe() if one.name != "full"]
    return {
        name: place
        for kind in (CHOOSES, DROPS)
        for place, name in enumerate(name for name in names if kind_of(name) == kind)
    }
