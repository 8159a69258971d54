"""Hooks that MkDocs calls while it builds the site (`mkdocs.yml`).

README.md and CHANGELOG.md become pages. A link from a page to another file of the repository becomes that file's path,
a picture from outside docs/ goes along into the site. So links work where the repository is read, and `--strict` finds
those that lead nowhere: what does not exist is left to it as it is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs"
# Page -> the file of the repository that it is made of, where that is not in docs/.
TAKEN = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
PAGES = {path: page for page, path in TAKEN.items()}
# Code, where brackets are no links; or a link or picture: "!", text, target, anchor.
CODE_OR_LINK = re.compile(
    r"```.*?```|``.+?``|`[^`\n]+`|(!?)\[((?:[^\[\]`]|`[^`\n]*`)*)\]\(([^)\s#]*)(#[^)\s]*)?\)", re.S
)


def on_files(files, config):
    """Adds the pages of TAKEN, and the pictures that pages show."""
    for page, path in TAKEN.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    pictures = set()
    for file in files.documentation_pages():
        for match in CODE_OR_LINK.finditer(file.content_string):
            target = _target(file.src_uri, match[3])
            if match[1] and target and _outside(target) and (ROOT / target).is_file():
                pictures.add(target)
    for target in sorted(pictures):
        files.append(File.generated(config, _copied(target), abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown, page, config, files):
    """The page's text with every link as the site has it."""
    return CODE_OR_LINK.sub(lambda match: _link(match, page.file.src_uri), markdown)


def _link(match: re.Match, page: str) -> str:
    picture, text, anchor = match[1], match[2], match[4] or ""
    target = _target(page, match[3])
    if target is None or not (ROOT / target).exists():
        return match[0]
    if target in PAGES:
        return f"[{text}]({PAGES[target]}{anchor})"
    if not _outside(target):
        return f"{picture}[{text}]({os.path.relpath(target, DOCS)}{anchor})"
    if picture:
        return f"![{text}]({_copied(target)})"
    return f"`{target}`" if text.strip("`") == target else f"{text} (`{target}`)"


def _target(page: str, link: str | None) -> str | None:
    """The path in the repository of a relative link; None for others."""
    if not link or ":" in link or link.startswith("/"):
        return None
    folder = "" if page in TAKEN else DOCS
    return os.path.normpath(os.path.join(folder, link))


def _outside(target: str) -> bool:
    return not target.startswith(f"{DOCS}/")


def _copied(target: str) -> str:
    """Where the site has a picture of the repository."""
    return f"pictures/{target}"
