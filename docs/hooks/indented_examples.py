"""Shows the indented examples of docstrings as code.

The docstrings set an example off by indentation alone. Markdown wants an empty line before it, too.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTIONS = re.compile(r"^\s*(Args|Attributes|Raises|Returns|Yields|Examples?):$")
_LEAD = re.compile(r"^(\s*)\S.*:$")


class IndentedExamples(griffe.Extension):
    """Inserts that line."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of `obj`, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = separate_examples(obj.docstring.value)


def separate_examples(text: str) -> str:
    """Return a docstring with an empty line before each indented example.

    A line `Example:` by itself is no section of its own for the reader: it becomes a plain one.
    """
    lines = text.splitlines()
    separated: list[str] = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        separated.append(line)
        lead = _LEAD.match(line)
        if lead is None or (_SECTIONS.match(line) and line.strip() != "Example:"):
            continue
        if following.startswith(lead.group(1) + "    "):
            separated.append("")
    return "\n".join(separated)
