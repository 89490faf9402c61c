"""The versions of the repository: uv holds no sibling against the range that asks for it."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
if not (ROOT / "noxfile.py").exists():
    pytest.skip("needs the repository, not one package of it", allow_module_level=True)

WORKSPACE = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text())["project"]
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
PINS = [Requirement(line) for line in WORKSPACE["tool"]["uv"]["constraint-dependencies"]]


def requirements_of(project):
    lists = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    return [Requirement(line) for lines in lists for line in lines]


REQUIREMENTS = [(name, line) for name in PROJECTS for line in requirements_of(PROJECTS[name])]
GROUPS = [
    Requirement(entry)
    for entries in WORKSPACE["dependency-groups"].values()
    for entry in entries
    if isinstance(entry, str)
]
SIBLINGS = [(name, line) for name, line in REQUIREMENTS if line.name in PROJECTS]
OTHERS = [line for _, line in REQUIREMENTS if line.name not in PROJECTS] + GROUPS


@pytest.mark.parametrize(("package", "requirement"), SIBLINGS, ids=str)
def test_a_sibling_is_in_the_range_that_is_asked_for(package, requirement):
    assert requirement.specifier.contains(PROJECTS[requirement.name]["version"]), package


@pytest.mark.parametrize(("package", "requirement"), SIBLINGS, ids=str)
def test_a_range_of_a_sibling_ends(package, requirement):
    if requirement.name != package:  # an extra may ask for another extra of its own package
        assert {clause.operator for clause in requirement.specifier} == {">=", "<"}


@pytest.mark.parametrize("requirement", OTHERS, ids=str)
def test_what_the_checks_install_is_pinned_inside_its_range(requirement):
    pins = [pin for pin in PINS if pin.name == requirement.name]
    assert pins, f"no pin for {requirement.name}"
    for pin in pins:
        (clause,) = pin.specifier
        assert clause.operator == "=="
        assert requirement.specifier.contains(clause.version)


def test_the_workflow_runs_every_package():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert f"package: [{', '.join(PROJECTS)}]" in workflow
