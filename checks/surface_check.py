"""Compare the public surface with the lists, or write them: `python -m checks.surface_check`."""

from __future__ import annotations

import argparse
import difflib
import subprocess
import sys

from checks import surface
from checks.workspace import PYPROJECTS, ROOT

_HEADER = (
    "# The public names and signatures of {package}. Written by `nox -s surface -- --write`; a\n"
    "# change to it belongs in CHANGELOG.md.\n"
)


def main() -> int:
    """Print every difference; return how the process ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the lists as they are now")
    parser.add_argument("--base", help="what a change is held against; default: main")
    options = parser.parse_args()
    modules = surface.load_sources(surface.workspace_sources())
    base = fork_point(options.base)
    problems: list[str] = []
    for package in PYPROJECTS:
        lines = surface.describe_modules(modules, surface.public_modules(package))
        problems += [
            f"{package}: {name} is imported by others and is not public: name its module "
            f"in [tool.surface] of packages/{package}/pyproject.toml"
            for name in surface.undeclared(package, lines)
        ]
        path = ROOT / "packages" / package / "api.txt"
        text = "".join(
            f"{line}\n" for line in (*_HEADER.format(package=package).splitlines(), *lines)
        )
        if options.write:
            path.write_text(text)
        problems += differences(package, path.read_text() if path.exists() else "", text)
        problems += unrecorded_change(package, base)
    print("\n".join(problems) or f"the lists hold; changes are recorded since {base or 'nowhere'}")
    return 1 if problems else 0


def differences(package: str, committed: str, current: str) -> list[str]:
    """Return how the committed list differs from the sources, and what to do about it."""
    pairs = difflib.unified_diff(
        committed.splitlines(), current.splitlines(), "api.txt", "sources", lineterm="", n=0
    )
    found = [line for line in pairs if not line.startswith("@@")]
    if not found:
        return []
    remedy = "undo it, or run `nox -s surface -- --write` and tell it in its CHANGELOG.md"
    return [f"{package}: the public surface is not what api.txt says; {remedy}", *found]


def unrecorded_change(package: str, base: str | None) -> list[str]:
    """Return a complaint if the list changed since `base` and the changelog did not."""
    if base is None:
        return []
    folder = f"packages/{package}"
    changed = git("diff", "--name-only", base, "--", f"{folder}/api.txt", f"{folder}/CHANGELOG.md")
    is_new = not git("ls-tree", base, f"{folder}/api.txt")
    if is_new or changed is None or changed.splitlines() != [f"{folder}/api.txt"]:
        return []
    return [f"{package}: api.txt changed since {base[:12]}; tell users in {folder}/CHANGELOG.md"]


def fork_point(base: str | None) -> str | None:
    """Return the commit that a change is held against; None where there is no history.

    On the main branch itself that is the commit before, unless something is not committed yet.
    """
    names = [base] if base else ["origin/main", "main"]
    known = [name for name in names if git("rev-parse", "--verify", "--quiet", name)]
    if base and not known:
        raise SystemExit(f"--base {base} names no commit")
    if not known:
        return None
    fork = git("merge-base", known[0], "HEAD")
    is_clean = not git("diff", "--name-only", "HEAD", "--", "packages")
    if is_clean and fork is not None and fork == git("rev-parse", "HEAD"):
        return git("rev-parse", "--verify", "--quiet", "HEAD^")
    return fork


def git(*arguments: str) -> str | None:
    """Return what git prints, without its last line end; None if it fails."""
    command = ["git", "-C", str(ROOT), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.rstrip("\n") if result.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
