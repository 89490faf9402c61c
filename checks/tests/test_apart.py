"""Every test is run with one of the sets of extras that a package can be installed with."""

import ast

import pytest

from checks.apart import (
    NO_DEVICE,
    device_tests,
    files_with,
    needed_by_tests,
    paths_to_test,
    requirements,
    together,
)
from checks.workspace import ROOT, third_party


def names_in(path):
    """Return the names of the tests and classes that a file defines."""
    return [node.name for node in ast.parse(path.read_text()).body if hasattr(node, "name")]


def test_extras_that_tests_need_are_those_that_packages_have():
    assert set(needed_by_tests()) == {line for line in requirements() if "[" in line}


@pytest.mark.parametrize("requirement", [line for line in requirements() if "[" in line])
def test_every_extra_has_tests(requirement):
    listed, expression = paths_to_test(requirement)
    assert listed
    assert expression == NO_DEVICE or "vllm" in third_party(requirement)


def test_the_tests_of_all_extras_are_run_together():
    without_vllm = [line for line in requirements() if "vllm" not in third_party(line)]
    for requirement in together(without_vllm):
        package, _, names = requirement.rstrip("]").partition("[")
        each = [f"{package}[{name}]" for name in names.split(",") if name]
        assert set(each) == {line for line in without_vllm if line.startswith(f"{package}[")}
        if each:
            paths, expression = paths_to_test(requirement)
            assert set(paths) == {path for line in each for path in paths_to_test(line)[0]}
            assert expression == NO_DEVICE


def test_a_package_alone_takes_the_slow_tests_that_need_no_extra():
    for requirement in requirements():
        if "[" not in requirement:
            listed, expression = paths_to_test(requirement)
            assert expression == f"slow and {NO_DEVICE}"
            assert set(listed) <= set(files_with("pytest.mark.slow", requirement))


def test_a_slow_test_beside_those_of_an_extra_is_run():
    """Where parts of a file need an extra, no other part of it is run where there is none."""
    parts, whole = {}, set()
    for requirement, paths in needed_by_tests().items():
        for path, _, name in (each.partition("::") for each in paths):
            if not name:
                whole.add(path)
            elif f"packages/{requirement.partition('[')[0]}/" in path:
                parts.setdefault(path, set()).add(name)
    for path in parts.keys() - whole:
        tests = {name for name in names_in(ROOT / path) if name.lower().startswith("test")}
        assert tests == parts[path]


def test_files_with_engines_are_run_where_there_are_engines():
    """Elsewhere their tests are left out by their marker."""
    with_engines = {
        path.partition("::")[0]
        for line, paths in needed_by_tests().items()
        if "vllm" in third_party(line)
        for path in paths
    }
    marked = files_with("pytest.mark.vllm")
    assert marked
    assert set(marked) <= with_engines


def test_no_two_packages_share_a_pytest_on_a_device():
    """In one pytest, `tiny_model` of one package's tests would be that of another."""
    found = device_tests()
    for package, files in found.items():
        assert files
        assert all(path.startswith(str(ROOT / "packages" / package / "tests")) for path in files)
    marked = {*files_with("pytest.mark.gpu"), *files_with("pytest.mark.multi_gpu")}
    assert marked == {path for files in found.values() for path in files}
    assert {"rl-dtensor-worker", "rl-megatron-worker", "rl-refit", "rl-policy"} <= found.keys()
