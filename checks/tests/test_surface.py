from pathlib import Path

import pytest

from checks import surface
from checks.surface_check import differences

SOURCE = '''
"""A package."""

from dataclasses import dataclass
from typing import Protocol, TypedDict

from mine.inside import Base

__all__ = ["LIMIT", "Config", "Driver", "Row", "call"]

LIMIT: int = 3
_hidden = 4


class Config(TypedDict, total=False):
    rate: float


@dataclass(frozen=True)
class Row:
    size: int
    name: str = "row"


class Driver(Base):
    def __init__(self, port, /, *hosts: str, limit: int = LIMIT):
        self.port = port
        self._socket = None

    @property
    def ready(self) -> bool: ...

    @staticmethod
    def parse(text: str) -> "Driver": ...

    async def step(self, *, count=1): ...

    def _private(self): ...


def call(a: int, b=2, *, c: str | None = None, **rest: object) -> dict[str, int]: ...


def not_exported(): ...
'''
INSIDE = """
class Base:
    def inherited(self, x: int) -> int: ...

    def _not(self): ...


def helper(): ...
"""
EXPECTED = """\
mine.Config.rate: float
mine.Config: class(TypedDict, total=False)
mine.Driver.__init__(port, /, *hosts: str, limit: int = LIMIT)
mine.Driver.inherited(x: int) -> int
mine.Driver.parse(text: str) -> Driver @staticmethod
mine.Driver.port
mine.Driver.ready: bool @property
mine.Driver.step(*, count=1) @async
mine.Driver: class(Base)
mine.LIMIT: int
mine.Row.__init__(size: int, name: str = 'row') -> None
mine.Row.name: str = 'row'
mine.Row.size: int
mine.Row: class() @dataclass(frozen=True)
mine.call(a: int, b=2, *, c: str | None = None, **rest: object) -> dict[str, int]
"""


@pytest.fixture
def describe(tmp_path):
    """Return a function that gives the public surface of a package with this `__init__`."""

    def describe(source: str, *names: str) -> list[str]:
        package = tmp_path / "mine"
        package.mkdir(exist_ok=True)
        Path(package, "__init__.py").write_text(source)
        Path(package, "inside.py").write_text(INSIDE)
        modules = surface.load_sources([tmp_path])
        return surface.describe_modules(modules, names or ["mine"])

    return describe


def test_every_public_name_has_a_line(describe):
    assert describe(SOURCE) == EXPECTED.splitlines()


def test_a_module_without_exports_shows_what_it_defines(describe):
    lines = describe(SOURCE, "mine.inside")
    assert lines == [
        "mine.inside.Base.inherited(x: int) -> int",
        "mine.inside.Base: class()",
        "mine.inside.helper()",
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("b=2", "b=3"),
        ("c: str | None", "c: str"),
        ("*, c:", "c:"),
        ("-> bool", "-> int"),
        ("rate: float", "rate: int"),
        ('name: str = "row"', 'name: str = "line"'),
        ("total=False", "total=True"),
        ("frozen=True", "frozen=False"),
        ("port, /,", "port,"),
        ("async def step", "def step"),
        ('"call"]', '"call", "not_exported"]'),
        ("def parse", "def read"),
        ("class Driver(Base)", "class Driver"),
        ("self.port", "self.door"),
    ],
)
def test_a_change_to_the_surface_shows(describe, before, after):
    assert before in SOURCE
    changed = SOURCE.replace(before, after)
    assert differences("mine", "\n".join(describe(SOURCE)), "\n".join(describe(changed)))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("_hidden = 4", "_hidden = 5"),
        ("_private(self)", "_private(self, x)"),
        ("LIMIT: int = 3", "LIMIT: int = 4"),
    ],
)
def test_a_change_inside_does_not_show(describe, before, after):
    assert before in SOURCE
    assert describe(SOURCE.replace(before, after)) == describe(SOURCE)


@pytest.fixture(scope="module")
def workspace_modules():
    return surface.load_sources(surface.workspace_sources())


def test_what_other_packages_import_is_public(workspace_modules):
    for package in surface.PYPROJECTS:
        names = surface.public_modules(package)
        lines = surface.describe_modules(workspace_modules, names)
        assert surface.undeclared(package, lines) == []


def test_what_other_packages_import_is_found(workspace_modules):
    assert "rl_refit.compat.handles.HandleOwner" in surface.used_from_outside("rl-refit")
    # Without the names of its modules, it is not in the list.
    lines = surface.describe_modules(workspace_modules, ["rl_refit"])
    assert "rl_refit.compat.handles.HandleOwner" in surface.undeclared("rl-refit", lines)


def test_what_pages_import_is_found():
    found = surface.used_from_outside("rl-policy")
    assert "rl_policy.data.datasets.ExactMatch" in found
    # At a prompt.
    assert "rl_policy.losses.group_relative_advantages" in found
