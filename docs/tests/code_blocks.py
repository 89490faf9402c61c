"""The code blocks of a Markdown file, as CommonMark sees them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]
"""Every file whose blocks are executed."""

# Ruff formats the Python blocks of Markdown, but for those whose language is said in braces.
_BRACES = re.compile(r"\{\s*\.(\w+)\s*\}")
_TITLE = re.compile(r'title="([^"]+)"')
_INCLUDE = re.compile(r'^--8<-- "([^"]+)"$')


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One fenced or indented block.

    Attributes:
        page: Its file, from the root of the repository.
        line: Line of its first line of text, from 1.
        language: The first word after the fence; an indented block holds commands, `bash`.
        title: The file that the block is the text of; None where it is none.
        text: What is between the fences.
    """

    page: str
    line: int
    language: str
    title: str | None
    text: str

    @property
    def where(self) -> str:
        """File and line."""
        return f"{self.page}:{self.line}"

    @property
    def included(self) -> str | None:
        """The file of the repository that the site puts in place of the text."""
        found = _INCLUDE.match(self.text.strip())
        return found.group(1) if found else None


def blocks_of(page: Path, text: str | None = None) -> list[Block]:
    """Return the blocks of a page, in order.

    Args:
        page: The file.
        text: Its text; None reads it.
    """
    tokens = MarkdownIt().parse(page.read_text() if text is None else text)
    found: list[Block] = []
    for token in tokens:
        if token.type not in ("fence", "code_block"):
            continue
        assert token.map is not None
        is_fenced = token.type == "fence"
        language, _, rest = _BRACES.sub(r"\1", token.info).strip().partition(" ")
        title = _TITLE.search(rest)
        found.append(
            Block(
                page=str(page.relative_to(ROOT)),
                line=token.map[0] + 1 + is_fenced,
                language=language if is_fenced else "bash",
                title=title.group(1) if title else None,
                text=token.content,
            )
        )
    return found


def commands_of(block: Block) -> list[tuple[str, str]]:
    """Return the commands of a block with the output that it shows for each.

    A `console` block marks its commands by `$ `; in a `bash` block every line is one. A backslash
    at the end goes on in the next line. What follows ` # ` is a comment.
    """
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "bash":
        stripped = (_without_comment(line) for line in lines)
        return [(line, "") for line in stripped if line]
    commands: list[tuple[str, str]] = []
    for line in lines:
        if line.startswith("$ "):
            commands.append((_without_comment(line[2:]), ""))
        elif commands:
            command, output = commands[-1]
            commands[-1] = (command, output + line + "\n")
        else:
            raise ValueError(f"{block.where}: a console block begins with '$ ', not {line!r}")
    return commands


def _without_comment(line: str) -> str:
    return re.sub(r"(^|\s+)# .*$", "", line).strip()
