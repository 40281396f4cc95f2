"""Hooks of mkdocs: the README is the first page of the site, and links that leave docs/ become plain names of files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the README as the first page."""
    text = _LINK.sub(_from_root, (ROOT / "README.md").read_text())
    files.append(File.generated(config, "index.md", content=text))
    return files


def _from_root(match: re.Match[str]) -> str:
    """A link of the README as one of a page of docs/."""
    mark, label, target = match.groups()
    if re.match(r"\w+:|#", target):
        return match[0]
    path = target.removeprefix("docs/")
    return f"{mark}[{label}]({path if path != target else f'../{target}'})"


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Replace links to what is not part of the site: files outside docs/, and directories."""
    here = (ROOT / "docs" / page.file.src_uri).parent

    def replace(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        path, _, _ = target.partition("#")
        if mark or not path or re.match(r"\w+:", path):
            return match[0]
        found = (here / path).resolve()
        if found.suffix == ".md" and found.is_relative_to(ROOT / "docs"):
            return match[0]
        return f"{label} (`{found.relative_to(ROOT)}`)" if label != str(found.relative_to(ROOT)) else f"`{label}`"

    return _LINK.sub(replace, markdown)
