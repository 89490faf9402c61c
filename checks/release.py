"""What has to agree before a package is published: tag, version, changelog, ranges, contents."""

from __future__ import annotations

import re
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from checks.workspace import PROJECTS, ROOT, Projects, extras, import_name

_TAG = re.compile(r"(?P<package>[a-z][a-z0-9-]*)-v(?P<version>\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)")
_HEADING = re.compile(r"^## +(.+?) *$", re.MULTILINE)
_RELATIVE_LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)\s]+)")


def parse_tag(tag: str) -> tuple[str, str]:
    """Return the package and the version that a tag names.

    Raises:
        ValueError: It is no tag of a release.

    >>> parse_tag("rl-batched-data-v0.2.0")
    ('rl-batched-data', '0.2.0')
    """
    match = _TAG.fullmatch(tag.removeprefix("refs/tags/"))
    if match is None:
        raise ValueError(f"the tag {tag!r} is not <package>-v<version>, as rl-refit-v0.3.0 is")
    return match["package"], match["version"]


def problems(package: str, *, tag: str | None, projects: Projects = PROJECTS) -> list[str]:
    """Return what speaks against releasing a package as its files say it is.

    Args:
        package: The distribution.
        tag: What the release is tagged, if it is yet.
        projects: The `[project]` tables of the workspace.
    """
    changelog = (ROOT / "packages" / package / "CHANGELOG.md").read_text()
    readme = (ROOT / "packages" / package / "README.md").read_text()
    version = projects[package]["version"]
    found = tag_problems(package, version, tag) if tag is not None else []
    found += changelog_problems(package, version, changelog)
    found += range_problems(package, projects)
    found += [f"{package}: README.md links to {link}" for link in _RELATIVE_LINK.findall(readme)]
    return found


def tag_problems(package: str, version: str, tag: str) -> list[str]:
    """Return how a tag differs from the package and the version that it should name."""
    if parse_tag(tag) == (package, version):
        return []
    return [f"the tag {tag} is not that of {package} {version}: {package}-v{version}"]


def changelog_problems(package: str, version: str, changelog: str) -> list[str]:
    """Return a complaint unless the newest heading of a changelog is the version."""
    headings = _HEADING.findall(changelog)
    if headings[:1] == [version]:
        return []
    first = headings[0] if headings else "nothing"
    return [f"{package}: CHANGELOG.md begins with {first}, not with version {version}"]


def range_problems(package: str, projects: Projects = PROJECTS) -> list[str]:
    """Return the siblings that a package asks for in a version, or with an extra, they lack."""
    found: list[str] = []
    for line in all_requirements(projects[package]):
        sibling = projects.get(line.name)
        if sibling is None:
            continue
        if not line.specifier.contains(sibling["version"]):
            found.append(f"{package} asks for {line}, and {line.name} is {sibling['version']}")
        unknown = sorted(line.extras - extras(line.name, projects).keys())
        found += [f"{package} asks for {line}, which has no extra {extra}" for extra in unknown]
    return found


def all_requirements(project: Any) -> list[Requirement]:
    """Return what a package asks for, alone and with each of its extras."""
    lists = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    return [Requirement(line) for lines in lists for line in lines]


def content_problems(package: str, *, sdist: Path, wheel: Path) -> list[str]:
    """Return what is missing from a package's files, or has no place there."""
    with tarfile.open(sdist) as archive:
        # Each begins with the folder of the version.
        in_sdist = [name.partition("/")[2] for name in archive.getnames()]
        metadata = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/pyproject.toml")
        assert metadata is not None
        project = tomllib.loads(metadata.read().decode())["project"]
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = archive.namelist()
    found = [] if project == PROJECTS[package] else [f"{sdist.name} is not of this checkout"]
    return found + missing_or_astray(package, in_sdist=in_sdist, in_wheel=in_wheel)


def missing_or_astray(
    package: str, *, in_sdist: Iterable[str], in_wheel: Iterable[str]
) -> list[str]:
    """Return what the names in an sdist and in a wheel lack, and those too many."""
    name = import_name(package)
    wheel_names, sdist_names = set(in_wheel), set(in_sdist)
    wanted = {f"{name}/__init__.py", f"{name}/py.typed"}
    licenses = {part for part in wheel_names if part.endswith(".dist-info/licenses/LICENSE")}
    folders = {part.partition("/")[0] for part in wheel_names}
    astray = {part for part in folders if part != name and not part.endswith(".dist-info")}
    files = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", f"src/{name}/__init__.py"}
    found = [f"the wheel of {package} lacks {part}" for part in sorted(wanted - wheel_names)]
    found += [f"the sdist of {package} lacks {part}" for part in sorted(files - sdist_names)]
    found += [f"the wheel of {package} holds {part}" for part in sorted(astray)]
    return found + ([] if licenses else [f"the wheel of {package} lacks its LICENSE"])
