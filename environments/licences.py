"""Lists the licence of every distribution that the Python running this file has installed.

    python environments/licences.py

Exit code 1: a distribution names a licence that is not in `ALLOWED`, or none at all. Every licence that it names has to
be allowed, also where it offers a choice. It uses the standard library alone, so that it runs in every environment.
"""

from __future__ import annotations

import re
import sys
from email.message import Message
from importlib import metadata

PERMISSIVE = (
    "0BSD AFL-2.1 Apache-2.0 BSD-2-Clause BSD-3-Clause BSL-1.0 CC0-1.0 CNRI-Python ISC MIT MIT-0 MIT-CMU PSF-2.0 "
    "Unlicense Zlib"
)
# MPL-2.0 stays with the files that it is on, which nobody here changes, and asks nothing of other files.
ALLOWED = (*PERMISSIVE.split(), "MPL-2.0", "Public Domain")
"""Licences, by their SPDX names, that let anyone use and redistribute kvc-trt with what it needs."""
NVIDIA = "NVIDIA"
"""NVIDIA's proprietary licences, which allow use. kvc-trt installs these packages and ships nothing of them."""
OTHER_NAMES = {
    "Apache-2.0": r"apache(-2\.0 with llvm-exception| software license|( license)?,?( version)? 2\.0( license)?| 2)",
    "BSD-3-Clause": r"(3-clause )?bsd( license| 3-clause|-3-clause license)?|modified bsd license",
    "ISC": r"isc license \(iscl\)",
    "MIT": r"(the )?mit license( \(mit\))?",
    "MPL-2.0": r"mozilla public license 2\.0 \(mpl 2\.0\)|mpl",
    "PSF-2.0": r"python software foundation license|psf( license)?",
    "Unlicense": r"the unlicense \(unlicense\)",
    NVIDIA: r".*nvidia.*",
}
"""What metadata writes for a licence, as a regular expression; letters' case does not count."""
NO_LICENCE = ("License :: OSI Approved", "License :: DFSG approved")
"""Classifiers that name no licence."""
READ_BY_HAND = {"kvpress": "Apache-2.0"}
"""Distributions whose metadata names no licence: that of the file that lies in them."""


def stated(fields: Message) -> list[str]:
    """Return the licences that a distribution names: the SPDX expression, else classifiers, else the free text."""
    if expression := fields.get("License-Expression"):
        return [name.strip(" ()") for name in re.split(r" (?:AND|OR) ", expression)]
    prefix = "License :: "
    classifiers = [text for text in fields.get_all("Classifier", []) if text.startswith(prefix)]
    named = [text.rsplit(" :: ", 1)[1] for text in classifiers if text not in NO_LICENCE]
    text = (fields.get("License") or "").strip()
    short = text if len(text) <= 60 else text.splitlines()[0]
    if named and named != ["Other/Proprietary License"]:
        return named
    if short.lower() == "proprietary":  # whose it is says the author alone
        return [f"{short}, of {fields.get('Author', 'nobody named')}"]
    return re.split(r" (?:AND|OR) ", short) if short else [READ_BY_HAND.get(fields["Name"].lower(), "none named")]


def known(name: str) -> str:
    """Return the SPDX name of a licence, the name itself where it has none here."""
    matches = (spdx for spdx, pattern in OTHER_NAMES.items() if re.fullmatch(pattern, name, re.IGNORECASE))
    return name if name in ALLOWED else next(matches, name)


def main() -> int:
    """Print one line for each distribution; return the exit code."""
    refused = 0
    for one in sorted(metadata.distributions(), key=lambda one: one.metadata["Name"].lower()):
        names = [known(name) for name in stated(one.metadata)]
        bad = [name for name in names if name not in (*ALLOWED, NVIDIA)]
        refused += bool(bad)
        verdict = f"   not allowed: {', '.join(bad)}" if bad else ""
        print(f"{one.metadata['Name']:32} {one.version:20} {', '.join(dict.fromkeys(names))}{verdict}")
    if refused:
        print(f"error: licences.py does not allow the licences of {refused} distributions", file=sys.stderr)
    return int(refused > 0)


if __name__ == "__main__":
    sys.exit(main())
