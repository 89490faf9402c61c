"""Every path and link of the READMEs and CONTRIBUTING.md leads somewhere."""

import re

import pytest
from code_blocks import PAGES, ROOT
from command_rules import rule_for
from markdown_it import MarkdownIt

OUTSIDE_THE_SITE = [page for page in PAGES if "docs" not in page.relative_to(ROOT).parts]
_PATH = re.compile(r"(?:packages|examples|docs|\.github)/[\w./*-]+")


def inline_tokens(page):
    for token in MarkdownIt().parse(page.read_text()):
        yield from token.children or []


@pytest.mark.parametrize("page", OUTSIDE_THE_SITE, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files(page):
    links = [str(token.attrs["href"]) for token in inline_tokens(page) if token.type == "link_open"]
    for link in links:
        if not link.startswith(("https://", "#")):
            target = link.partition("#")[0]
            assert (page.parent / target).exists(), f"{page}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_in_the_text_exist(page):
    named = [
        found
        for token in inline_tokens(page)
        if token.type == "code_inline"
        for found in [token.content]
        if _PATH.fullmatch(found)
    ]
    for path in named:
        assert any(ROOT.glob(path.rstrip("/"))), f"{page}: there is no {path}"


def test_contributing_names_files_to_start_from():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(set(_PATH.findall(text))) >= 12


def test_commands_in_the_text_could_be_run(workspace):
    found = 0
    for page in PAGES:
        for token in inline_tokens(page):
            rule = rule_for(token.content) if token.type == "code_inline" else None
            if rule is not None and " " in token.content:
                rule.check(token.content)
                found += 1
    assert found > 20
