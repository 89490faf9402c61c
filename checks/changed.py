"""Which packages a change touches, with those that depend on them: the matrix of CI."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable

from checks.workspace import PROJECTS, ROOT, Projects, dependents

# What no package is built from or tested with.
PROSE = ("docs/", "README.md", "CONTRIBUTING.md", "LICENSE", ".gitignore", "mkdocs.yml")
# The packages whose tests are jobs of their own.
ALONE = "rl-megatron-worker"
WITH_ENGINES = "rl-policy"
# Prose whose programs run with the engines.
PROSE_WITH_ENGINES = (
    "docs/pages/how-to/any-trainer.md",
    "docs/pages/how-to/async.md",
    "docs/pages/how-to/vllm-apart.md",
    "docs/tests/",
)


def changed_paths(base: str) -> list[str]:
    """Return the paths that differ between the working tree and where it left `base`.

    A hash that is not known here, as that before a branch's first push or a forced one, is told
    nothing of: all paths have changed.
    """
    if re.fullmatch("[0-9a-f]{40}", base) and not _is_known(base):
        return _git("ls-files")
    (fork,) = _git("merge-base", base, "HEAD")
    return _git("diff", "--name-only", "--no-renames", fork)


def _is_known(commit: str) -> bool:
    command = ["git", "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


def _git(*arguments: str) -> list[str]:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


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


def job_matrix(packages: Iterable[str], paths: Iterable[str] = ()) -> str:
    """Return what CI runs for these packages, and for a change to `paths`, as one line of JSON.

    >>> job_matrix(["rl-dtensor-worker", "rl-megatron-worker"])
    '{"packages": ["rl-dtensor-worker"], "megatron": true, "vllm": false, \
"apart": ["rl-dtensor-worker", "rl-megatron-worker"]}'
    """
    names = list(packages)
    runs_engines = any(path.startswith(PROSE_WITH_ENGINES) for path in paths)
    return json.dumps(
        {
            "packages": [name for name in names if name != ALONE],
            "megatron": ALONE in names,
            "vllm": runs_engines or WITH_ENGINES in names,
            "apart": names,
        }
    )
