"""The fenced blocks of the README and of docs/, and how each of them is checked.

A block of a tutorial is executed. Elsewhere, Python is executed, commands are checked against the real command line,
and YAML against the schema of its configuration. A comment before a block says why it is not:
`<!-- not run: reason -->`.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in DOCS.rglob("*.md") if "decisions" not in page.parts),
]

_BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w*)(?P<info>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S)
_MARK = re.compile(r"<!-- not run: ([^>]+?) -->\s*\Z")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    title: str
    """The file that a block of a tutorial is written to."""
    exit_code: int
    code: str
    not_run: str
    """Why it is not checked; empty otherwise."""

    @property
    def name(self) -> str:
        """The place of the block, as the id of its test."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def read_blocks(page: Path) -> list[Block]:
    """All blocks of a page, in their order."""
    text, blocks = page.read_text(), []
    for match in _BLOCK.finditer(text):
        indent, info = match["indent"], match["info"]
        mark = _MARK.search(text[: match.start()])
        title, code = re.search(r'title="([^"]+)"', info), re.search(r"exit=(\d+)", info)
        blocks.append(
            Block(
                page,
                text[: match.start()].count("\n") + 1,
                match["language"],
                title[1] if title else "",
                int(code[1]) if code else 0,
                re.sub(rf"^{indent}", "", match["code"], flags=re.M),
                mark[1] if mark else "",
            )
        )
    return blocks
