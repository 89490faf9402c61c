"""Which packages a change touches, with those that depend on them: the matrix of CI."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable

from checks.workspace import PROJECTS, ROOT, Projects, dependents

# What no package is built from or tested with.
PROSE = ("docs/", "README.md", "CONTRIBUTING.md", "LICENSE", ".gitignore", "mkdocs.yml")
# The packages whose tests are jobs of their own.
ALONE = "rl-megatron-worker"
WITH_ENGINES = "rl-policy"


def changed_paths(base: str) -> list[str]:
    """Return the paths that differ between the working tree and where it left `base`."""
    fork = subprocess.run(
        ["git", "merge-base", base, "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tracked = subprocess.run(
        ["git", "diff", "--name-only", "--no-renames", fork.stdout.strip()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return tracked.stdout.splitlines()


def touched_packages(paths: Iterable[str], projects: Projects = PROJECTS) -> list[str]:
    """Return the packages to test after a change to `paths`, sorted.

    A path outside the packages concerns all of them, unless it is prose.

    >>> touched_packages(["packages/rl-policy/README.md", "docs/index.md"])
    ['rl-policy']
    """
    touched: set[str] = set()
    for path in paths:
        folder, _, rest = path.partition("/")
        package = rest.partition("/")[0]
        if folder == "packages" and package in projects:
            touched |= dependents(package, projects)
        elif not path.startswith(PROSE):
            touched |= set(projects)
    return sorted(touched)


def job_matrix(packages: Iterable[str]) -> str:
    """Return what CI runs for these packages, as one line of JSON.

    >>> job_matrix(["rl-megatron-worker", "rl-policy"])
    '{"packages": ["rl-policy"], "megatron": true, "vllm": true, "any": true}'
    """
    names = list(packages)
    return json.dumps(
        {
            "packages": [name for name in names if name != ALONE],
            "megatron": ALONE in names,
            "vllm": WITH_ENGINES in names,
            "any": bool(names),
        }
    )
