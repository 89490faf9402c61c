"""The packages of the workspace, and who needs whom, as their `pyproject.toml` files say."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
WORKSPACE: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYPROJECTS: dict[str, dict[str, Any]] = {
    path.parent.name: tomllib.loads(path.read_text())
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
PROJECTS: dict[str, dict[str, Any]] = {name: file["project"] for name, file in PYPROJECTS.items()}

Projects = Mapping[str, Mapping[str, Any]]


def import_name(package: str) -> str:
    """Return the name under which a distribution is imported."""
    return package.replace("-", "_")


def extras(package: str, projects: Projects = PROJECTS) -> dict[str, list[str]]:
    """Return the requirements of each extra of a package."""
    return dict(projects[package].get("optional-dependencies", {}))


def declared(requirement: str, projects: Projects = PROJECTS) -> list[str]:
    """Return what `requirement` asks for in turn, that of its extras with it."""
    wanted = Requirement(requirement)
    named = extras(wanted.name, projects)
    own = [line for extra in sorted(wanted.extras) for line in named[extra]]
    return [*projects[wanted.name]["dependencies"], *own]


def siblings(requirement: str, projects: Projects = PROJECTS) -> set[str]:
    """Return the workspace packages that installing `requirement` brings, itself among them."""
    lines = declared(requirement, projects)
    inside = [line for line in lines if Requirement(line).name in projects]
    return {Requirement(requirement).name}.union(*(siblings(line, projects) for line in inside))


def third_party(requirement: str, projects: Projects = PROJECTS) -> set[str]:
    """Return the other distributions that `requirement` and its siblings ask for by name."""
    lines = declared(requirement, projects)
    inside = [line for line in lines if Requirement(line).name in projects]
    outside = {Requirement(line).name for line in lines} - set(projects)
    return outside.union(*(third_party(line, projects) for line in inside))


def with_every_extra(package: str, projects: Projects = PROJECTS) -> str:
    """Return the requirement that asks for a package with all of its extras."""
    names = sorted(extras(package, projects))
    return f"{package}[{','.join(names)}]" if names else package


def dependents(package: str, projects: Projects = PROJECTS) -> set[str]:
    """Return the packages that a change to `package` can break, itself among them."""
    return {
        name for name in projects if package in siblings(with_every_extra(name, projects), projects)
    }
