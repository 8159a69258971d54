"""The documents, README.md and the pages of docs/, and what stands in them. Importing this does not import jax."""

import re
from pathlib import Path

from helpers import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
TOP = ("taco_jax", "pallas_kernels", "experiments", "tests", "docs", ".ci")
# A path as documents write it: below one of the repository's folders, or a file of its root.
PATH = re.compile(
    rf"(?<![\w./-])((?:{'|'.join(map(re.escape, TOP))})(?:/[\w.-]+)+"
    r"|(?:README|CHANGELOG)\.md|LICENSE|mkdocs\.yml|pyproject\.toml)(?![\w/*-])"
)
LINK = re.compile(r"!?\[(?:[^\[\]`]|`[^`\n]*`)*\]\(([^)\s]+)\)")


def text(page: Path) -> str:
    """Without comments, but for what they hold in code."""
    return re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.S)


def prose(page: Path) -> str:
    """The text without blocks of code."""
    return re.sub(r"```.*?```", "", text(page), flags=re.S)


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", text(page), flags=re.S)


def paths(page: Path) -> list[str]:
    """Paths that the page names, in code, blocks and prose; those with a * are patterns."""
    return [path.rstrip(".") for path in PATH.findall(re.sub(r"\]\([^)]*\)", "]", text(page)))]


def links(page: Path) -> list[str]:
    """Targets of links and pictures."""
    return LINK.findall(re.sub(r"`[^`\n]*`", "`code`", prose(page)))


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page can name."""
    heads = re.findall(r"^#+ (.+)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}
