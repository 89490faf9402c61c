"""Puts drawings, `![title](name.svg){.drawn}`, into the page, where they follow its colours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_IMAGE = re.compile(r"!\[([^\]]*)\]\(([\w./-]+\.svg)\)\{\.drawn\}")


def on_page_markdown(markdown: str, page: Any, config: Any, **kwargs: Any) -> str:
    """Replace each drawing by its SVG, with the page's text as its caption."""
    folder = Path(config["docs_dir"], page.file.src_uri).parent

    def inlined(found: re.Match[str]) -> str:
        caption, path = found.groups()
        svg = re.sub(r"\n\s*", " ", (folder / path).read_text().strip())
        return f'<figure class="drawn">{svg}<figcaption>{caption}</figcaption></figure>'

    return _IMAGE.sub(inlined, markdown)
