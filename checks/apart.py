"""What each package may bring and load when it is installed alone, or with one of its extras."""

from __future__ import annotations

import ast
import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from checks.workspace import PROJECTS, ROOT, extras, import_name, third_party

# What importing a package must not load, whatever is installed, and installing it alone not bring.
FORBIDDEN = {
    "rl-interfaces": [
        *("torch", "numpy", "transformers", "safetensors", "pydantic", "pytest", "ray", "vllm"),
        *("rl_batched_data", "rl_refit", "rl_policy"),
    ],
    "rl-batched-data": ["transformers", "ray", "vllm", "rl_interfaces", "rl_refit", "rl_policy"],
    "rl-refit": ["transformers", "ray", "vllm", "rl_interfaces", "rl_batched_data", "rl_policy"],
    "rl-dtensor-worker": ["ray", "vllm", "megatron", "peft", "rl_megatron_worker", "rl_policy"],
    "rl-megatron-worker": ["ray", "vllm", "peft", "rl_dtensor_worker", "rl_policy"],
    "rl-policy": ["rl_dtensor_worker", "rl_megatron_worker", "megatron", "vllm", "peft"],
}
# The packages that bring these distributions and no other.
BRINGS = {"rl-interfaces": ["rl-interfaces", "typing-extensions"]}
# The modules that an extra is for; they need what it brings.
EXTRA_MODULES = {
    "rl-interfaces": {
        "backend": ["rl_interfaces.backend"],
        "testing": ["rl_interfaces.testing"],
    },
    "rl-policy": {"tinker": ["rl_policy.tinker.server"]},
    "rl-refit": {
        "vllm": [
            f"rl_refit.vllm.{name}"
            for name in ("adapters", "engine", "reload", "slices", "staging")
        ],
    },
}
# What an extra makes possible.
WORKS = {
    "rl-batched-data[liger]": "import liger_kernel.ops",
    "rl-dtensor-worker[liger]": "import liger_kernel.ops",
    "rl-dtensor-worker[lora]": "import peft",
    **{
        f"rl-policy[{name}]": f"from rl_policy.backends import load; load({name!r}).find_engine()"
        for name in ("dtensor", "megatron")
    },
    "rl-policy[mlflow]": "from rl_policy.run.trackers import check_trackers\n"
    "check_trackers(['mlflow']); import mlflow, sqlalchemy",
    "rl-policy[plot]": "import matplotlib",
    "rl-policy[report]": "import plotly",
    "rl-policy[tinker]": "from rl_policy.tinker.command import require_extra; require_extra()",
    **{
        f"rl-policy[{name}]": "from rl_policy.run.trackers import check_trackers\n"
        f"check_trackers([{name!r}]); import {name}"
        for name in ("tensorboard", "trackio", "wandb")
    },
    "rl-policy[lora]": "import peft; from rl_policy.backends import load; "
    "load('dtensor').find_engine()",
    **{
        f"rl-policy[{name}]": "from rl_policy.backends import load_engine\n"
        "from rl_policy.generation.vllm.engine.environment import require_vllm\n"
        "load_engine('vllm'); require_vllm()"
        for name in ("vllm", "all")
    },
}
# What asks for an extra that is not there, and what the ImportError must then say.
_ENABLED = "from rl_policy.backends import enabled_backend, load; load(enabled_backend({!r}))"
REFUSALS = {
    "rl-dtensor-worker": [
        (
            "from rl_dtensor_worker.config import require_peft; require_peft()",
            'pip install "rl-dtensor-worker[lora]"',
        )
    ],
    "rl-policy": [
        (
            "from rl_policy.backends import load; load('dtensor')",
            'pip install "rl-policy[dtensor]"',
        ),
        *(
            (_ENABLED.format({f"{name}_cfg": {"enabled": True}}), f'"rl-policy[{name}]"')
            for name in ("dtensor", "megatron")
        ),
        (
            "from rl_policy.generation.vllm.engine.environment import require_vllm; require_vllm()",
            'pip install "rl-policy[vllm]"',
        ),
    ],
}
NO_DEVICE = "not (gpu or multi_gpu or vllm)"
ON_DEVICE = "gpu or multi_gpu"


@functools.cache
def needed_by_tests() -> dict[str, list[str]]:
    """Return the tests that need an extra, by requirement, as paths or parts of files.

    They say so by `pytest.mark.needs("PACKAGE[EXTRA]")`: a file for all of its tests in its
    `pytestmark`, a test or a class for itself. Files are read, as they can be imported only where
    the extra is installed.
    """
    found: dict[str, list[str]] = {}
    for path in files_of_tests():
        for statement in ast.parse(path.read_text()).body:
            for requirement in _needs(statement):
                name = getattr(statement, "name", None)
                part = str(path) if name is None else f"{path}::{name}"
                found.setdefault(requirement, []).append(part)
    return found


def _needs(statement: ast.stmt) -> list[str]:
    """Return the requirements that a statement of a test module marks tests with."""
    if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark":
        marks: list[ast.expr] = [statement.value]
    elif isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        marks = statement.decorator_list
    else:
        return []
    calls = [node for mark in marks for node in ast.walk(mark) if isinstance(node, ast.Call)]
    return [
        ast.literal_eval(call.args[0])
        for call in calls
        if ast.unparse(call.func) == "pytest.mark.needs"
    ]


def files_of_tests(package: str = "*") -> list[Path]:
    """Return the files of tests of a package, of `docs`, or of all of these."""
    found = sorted(ROOT.glob(f"packages/{package}/tests/**/test_*.py"))
    return found + sorted(ROOT.glob("docs/tests/test_*.py")) if package in ("*", "docs") else found


def files_with(text: str, package: str = "*") -> list[str]:
    """Return the files of tests that hold `text`, a marker say, as absolute paths."""
    return [str(path) for path in files_of_tests(package) if text in path.read_text()]


def device_tests() -> dict[str, list[str]]:
    """Return the files with tests that need a GPU, by package, each for a pytest of its own.

    In one pytest the modules beside the tests of two packages would share a name.
    """
    marked = {package: {*files_with("pytest.mark.gpu", package)} for package in PROJECTS}
    for package, files in marked.items():
        files.update(files_with("pytest.mark.multi_gpu", package))
    return {package: sorted(files) for package, files in marked.items() if files}


def paths_to_test(requirement: str) -> tuple[list[str], str]:
    """Return what pytest is to run where `requirement` is installed: paths, and `-m`.

    For extras these are the tests that need one of them; the slow ones of the others are run where
    the package is installed alone. All that are fast have been run from the sources by
    `nox -s tests`.
    """
    needed = needed_by_tests()
    wanted = Requirement(requirement)
    if wanted.extras:
        with_vllm = "vllm" in third_party(requirement)
        each = [needed[f"{wanted.name}[{extra}]"] for extra in sorted(wanted.extras)]
        paths = list(itertools.chain.from_iterable(each))
        return paths, "not (gpu or multi_gpu)" if with_vllm else NO_DEVICE
    of_extras = [
        path
        for other, paths in needed.items()
        for path in paths
        if Requirement(other).name == wanted.name
    ]
    elsewhere = {path.partition("::")[0] for path in of_extras}
    slow = files_with("pytest.mark.slow", wanted.name)
    return [path for path in slow if path not in elsewhere], f"slow and {NO_DEVICE}"


def together(wanted: Sequence[str]) -> list[str]:
    """Return one requirement for each package in `wanted`, with all the extras that are there."""
    extras_of: dict[str, set[str]] = {}
    for requirement in map(Requirement, wanted):
        extras_of.setdefault(requirement.name, set()).update(requirement.extras)
    return [
        f"{name}[{','.join(sorted(found))}]" if found else name for name, found in extras_of.items()
    ]


def requirements() -> list[str]:
    """Return every package alone, and with each of its extras."""
    return [wanted for package in PROJECTS for wanted in requirements_of(package)]


def requirements_of(package: str) -> list[str]:
    """Return a package alone, and with each of its extras."""
    return [package, *(f"{package}[{extra}]" for extra in sorted(extras(package)))]


def probe_request(requirement: str) -> str:
    """Return what `probe.py` is to check of an installed `requirement`."""
    wanted = Requirement(requirement)
    modules = EXTRA_MODULES.get(wanted.name, {})
    alone = not wanted.extras
    request = {
        "package": import_name(wanted.name),
        "extra_modules": [name for names in modules.values() for name in names],
        "wanted": [name for extra in wanted.extras for name in modules.get(extra, [])],
        "forbidden": FORBIDDEN[wanted.name],
        "alone": alone,
        "brings": BRINGS.get(wanted.name) if alone else None,
        "works": WORKS.get(requirement),
        "refusals": REFUSALS.get(wanted.name, []) if alone else [],
    }
    return json.dumps(request)


def format_table(rows: dict[str, dict[str, Any]]) -> str:
    """Return what was measured, as a table.

    Args:
        rows: By requirement, what `probe.py` printed; None is what it did not measure.
    """
    lines = [f"{'installed':<30}{'distributions':>14}{'MB':>8}{'modules':>9}{'import s':>10}"]
    lines += [
        f"{name:<30}{row['distributions']:>14}{row['bytes'] / 1e6:>8.1f}"
        f"{cell(row['modules'], 9)}{cell(row['seconds'], 10, '.2f')}"
        for name, row in rows.items()
    ]
    return "\n".join(lines)


def cell(value: float | None, width: int, form: str = "") -> str:
    """Return a number at the right of a column, or a dash for what was not measured."""
    return f"{'-' if value is None else format(value, form):>{width}}"
