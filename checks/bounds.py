"""The lower bounds that packages declare, against what a test was run with."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.requirements import Requirement
from packaging.version import Version

from checks.workspace import PROJECTS, Projects, declared

# Runs in the environment that is looked at, which may have nothing but the standard library.
LIST_INSTALLED = """
import importlib.metadata, json
found = importlib.metadata.distributions()
print(json.dumps({part.name.lower().replace("_", "-"): part.version for part in found}))
"""


def higher_than_declared(
    requirement: str, installed: Mapping[str, str], projects: Projects = PROJECTS
) -> list[str]:
    """Return the bounds of `requirement` below which its other dependencies let nobody go.

    Such a bound is never tested, and promises what nobody gets. Siblings are left out: theirs are
    compared with their versions.
    """
    found: list[str] = []
    for line in map(Requirement, declared(requirement, projects)):
        if line.name in projects or (line.marker and not line.marker.evaluate()):
            continue
        (bound,) = [part.version for part in line.specifier if part.operator == ">="]
        version = Version(installed[line.name.lower()])
        if version > Version(bound):
            found.append(f"{line.name}>={bound} is declared and {version} is the lowest there is")
    return found
