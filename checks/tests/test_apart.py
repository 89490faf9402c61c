"""Every test is run with one of the sets of extras that a package can be installed with."""

import ast

import pytest

from checks.apart import TESTS, paths_to_test, requirements
from checks.workspace import PROJECTS, ROOT, third_party


def names_in(path):
    """Return the names of the tests and classes that a file defines."""
    return [node.name for node in ast.parse(path.read_text()).body if hasattr(node, "name")]


@pytest.mark.parametrize("package", PROJECTS)
def test_every_file_is_run_by_some_requirement(package):
    wanted = [line for line in requirements() if line.partition("[")[0] == package]
    run = {path.partition("::")[0] for line in wanted for path in paths_to_test(line)}
    found = ROOT.glob(f"packages/{package}/tests/test_*.py")
    assert {str(path) for path in found} <= run


@pytest.mark.parametrize("requirement", requirements())
def test_every_requirement_has_tests_which_are_there(requirement):
    listed = paths_to_test(requirement)
    assert listed
    for path, _, name in (each.partition("::") for each in listed):
        assert not name or name in names_in(ROOT / path), f"{path} has no {name}"


def test_files_of_which_parts_are_run_are_run_whole():
    """A test beside the parts that are named would be run by nobody."""
    parts, whole = {}, set()
    for line in requirements():
        for path, _, name in (each.partition("::") for each in paths_to_test(line)):
            if name:
                parts.setdefault(path, set()).add(name)
            else:
                whole.add(path)
    for path in parts.keys() - whole - {str(ROOT / "docs/tests/test_code_blocks.py")}:
        tests = {name for name in names_in(ROOT / path) if name.lower().startswith("test")}
        assert tests == parts[path]


def test_files_with_engines_are_run_where_there_are_engines():
    """Elsewhere their tests are left out by their marker."""
    with_engines = {
        path.partition("::")[0]
        for line in TESTS
        if "vllm" in third_party(line)
        for path in paths_to_test(line)
    }
    marked = [
        str(path)
        for path in ROOT.glob("packages/*/tests/test_*.py")
        if "pytest.mark.vllm" in path.read_text()
    ]
    assert marked
    assert set(marked) <= with_engines
