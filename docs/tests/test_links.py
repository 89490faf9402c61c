"""Every path, link and dotted name of the pages leads somewhere."""

import re

import pytest
from code_blocks import PAGES, ROOT
from command_rules import rule_for
from markdown_it import MarkdownIt
from rl_policy.recipes import find_recipe, installed_recipes

pytestmark = pytest.mark.promise
OUTSIDE_THE_SITE = [page for page in PAGES if "docs" not in page.relative_to(ROOT).parts]
_PATH = re.compile(r"(?:packages|examples|docs|\.github)/[\w./*-]+")
PACKAGES = {path.name: path for path in sorted(ROOT.glob("packages/*/src/*")) if path.is_dir()}
# Named like modules, but none.
ENTRY_POINT_GROUPS = {"rl_policy.workers", "rl_megatron_worker.converters"}


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_dotted_names_in_the_text_exist(page):
    for token in inline_tokens(page):
        package, *names = token.content.split(".") if token.type == "code_inline" else [""]
        is_name = package in PACKAGES and all(name.isidentifier() for name in names)
        if not is_name or token.content in ENTRY_POINT_GROUPS:
            continue
        path = PACKAGES[package]
        while names and (path / names[0]).is_dir():
            path /= names.pop(0)
        if names and (path / f"{names[0]}.py").is_file():
            path /= f"{names.pop(0)}.py"
        text = (path if path.suffix else path / "__init__.py").read_text()
        for name in names:
            assert re.search(rf"\b{name}\b", text), f"{page}: there is no {token.content}"


def test_the_design_page_shows_every_folder():
    text = (ROOT / "docs/pages/design.md").read_text()
    tree = text.partition("```text\n")[2].partition("```")[0]
    shown, package = set(), ""
    for line in tree.splitlines():
        name = line.removeprefix("├── ").removeprefix("└── ").split()[0]
        package = name if line.startswith("rl_") else package
        shown.add((package, name))
    folders = {
        (package, init.parent.name)
        for package, path in PACKAGES.items()
        for init in [path / "__init__.py", *path.glob("*/__init__.py")]
    }
    assert shown == folders


def test_the_reference_has_a_table_of_every_section():
    tables = re.findall(r"table: (\S+)", (ROOT / "docs/pages/configuration.md").read_text())
    shown = {name.rpartition(".")[2] for name in tables}
    for recipe in map(find_recipe, installed_recipes()):
        for key, section in recipe.sections.items():
            assert section.__name__ in shown, f"{key} of {recipe.name}"


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
