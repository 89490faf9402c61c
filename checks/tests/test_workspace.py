import subprocess

import pytest

from checks.changed import changed_paths, job_matrix, touched_packages
from checks.workspace import PROJECTS, ROOT, dependents, siblings, third_party, with_every_extra

# Bottom, two that need it, one of them by an extra alone, and one that nobody needs.
PACKAGES = {
    "bottom": {"dependencies": ["typing-extensions>=4"], "optional-dependencies": {"x": ["numpy"]}},
    "worker": {"dependencies": ["bottom[x]>=0.1,<0.2", "torch"]},
    "top": {
        "dependencies": ["bottom>=0.1,<0.2", "ray"],
        "optional-dependencies": {"worker": ["worker>=0.1"], "all": ["top[worker]"]},
    },
    "apart": {"dependencies": []},
}


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("bottom", {"bottom"}),
        ("top", {"top", "bottom"}),
        ("top[worker]", {"top", "bottom", "worker"}),
        ("top[all]", {"top", "bottom", "worker"}),
    ],
)
def test_siblings_of_a_requirement_follow_its_extras(requirement, expected):
    assert siblings(requirement, PACKAGES) == expected


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("bottom", {"typing-extensions"}),
        ("bottom[x]", {"typing-extensions", "numpy"}),
        ("top", {"typing-extensions", "ray"}),
        ("top[all]", {"typing-extensions", "ray", "numpy", "torch"}),
    ],
)
def test_third_parties_of_a_requirement_follow_its_extras(requirement, expected):
    assert third_party(requirement, PACKAGES) == expected


def test_every_extra_is_asked_for():
    assert with_every_extra("top", PACKAGES) == "top[all,worker]"
    assert with_every_extra("apart", PACKAGES) == "apart"


def test_a_package_that_needs_another_by_an_extra_alone_depends_on_it():
    assert dependents("worker", PACKAGES) == {"worker", "top"}
    assert dependents("bottom", PACKAGES) == {"bottom", "worker", "top"}
    assert dependents("apart", PACKAGES) == {"apart"}


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([], []),
        (["docs/index.md", "README.md", "CONTRIBUTING.md"], []),
        (["packages/worker/src/worker/a.py"], ["top", "worker"]),
        (["packages/apart/README.md", "packages/top/tests/test_a.py"], ["apart", "top"]),
        # Nobody knows what these concern.
        (["noxfile.py"], ["apart", "bottom", "top", "worker"]),
        (["checks/changed.py"], ["apart", "bottom", "top", "worker"]),
        (["pyproject.toml", "docs/index.md"], ["apart", "bottom", "top", "worker"]),
        ([".github/workflows/ci.yml"], ["apart", "bottom", "top", "worker"]),
        (["packages/unknown/a.py"], ["apart", "bottom", "top", "worker"]),
    ],
)
def test_a_change_concerns_packages_and_their_dependents(paths, expected):
    assert touched_packages(paths, PACKAGES) == expected


def test_the_matrix_keeps_jobs_of_their_own_apart():
    assert job_matrix([]) == '{"packages": [], "megatron": false, "vllm": false, "apart": []}'
    assert '"packages": ["rl-refit"], "megatron": false, "vllm": false' in job_matrix(["rl-refit"])


def test_programs_in_prose_run_with_the_engines_they_need():
    paths = ["docs/pages/how-to/vllm-apart.md", "docs/index.md"]
    assert '"vllm": true, "apart": []' in job_matrix([], paths)
    assert '"vllm": false' in job_matrix([], paths[1:])


def test_a_base_that_is_not_known_has_all_paths_changed():
    assert {"noxfile.py", "packages/rl-refit/README.md"} <= set(changed_paths("0" * 40))
    assert changed_paths("HEAD") != changed_paths("0" * 40)
    with pytest.raises(subprocess.CalledProcessError):
        changed_paths("no-such-branch")


def test_the_workspace_has_the_directions_it_should_have():
    assert dependents("rl-interfaces") == set(PROJECTS) - {"rl-batched-data", "rl-refit"}
    assert siblings("rl-refit") == {"rl-refit"}
    assert dependents("rl-dtensor-worker") == {"rl-dtensor-worker", "rl-policy"}
    assert dependents("rl-policy") == {"rl-policy"}
    assert third_party("rl-interfaces") == {"typing-extensions"}


@pytest.mark.parametrize("package", PROJECTS)
def test_each_package_has_the_license_of_the_repository(package):
    assert (ROOT / "packages" / package / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
