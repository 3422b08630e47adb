"""Links in the documentation lead somewhere: to files that exist, and to headings that they have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "kvc_trt/models/checkpoints/*/README.md")
    for page in ROOT.glob(pattern)
)
FENCED = re.compile(r"^```.*?^```$", flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(page: Path) -> set[str]:
    """Return the headings of a page as GitHub links to them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def name(page: Path) -> str:
    """Return a page as messages name it."""
    return page.relative_to(ROOT).as_posix()


def targets(page: Path) -> set[Path]:
    """Return the files of the project that a page links to."""
    links = re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text()))
    paths = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:", link)]
    return {(page.parent / path).resolve() for path in paths if path}


def wrong_links(page: Path) -> Iterator[str]:
    """Yield the mistakes in the links of a page."""
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{name(page)}: {link} leads nowhere"
        elif anchor and anchor not in anchors(target):
            yield f"{name(page)}: {link}: {target.name} has no such heading"


def test_every_link_leads_to_a_page_and_heading_that_exist() -> None:
    wrong = [one for page in PAGES for one in wrong_links(page)]
    assert not wrong, "\n".join(wrong)


def test_the_tested_pages_include_docs_and_readme() -> None:
    names = {name(page) for page in PAGES}
    assert {"README.md", "docs/architecture.md", "docs/policies/README.md", "docs/kernels/attention.md"} <= names


def test_every_page_of_docs_is_linked_from_its_index() -> None:
    """Decisions are linked from their own index."""
    docs = ROOT / "docs"
    index, decisions = docs / "README.md", docs / "decisions" / "README.md"
    assert index in targets(ROOT / "README.md")
    pages = {page for page in PAGES if page.is_relative_to(docs)} - {index}
    missing = pages - targets(index) - targets(decisions)
    assert not missing, f"{name(index)} links to none of {', '.join(sorted(map(name, missing)))}"
    assert decisions in targets(index)
