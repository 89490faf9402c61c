"""The public names and signatures of the packages, read from the sources without an import.

Public is what a package's `__init__` exports, and what the modules hold that `[tool.surface]` of
its `pyproject.toml` names. `packages/<name>/api.txt` keeps the list; `nox -s surface` compares.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import griffe

from checks.workspace import PYPROJECTS, ROOT, import_name

_MARKS = ("abstractmethod", "async", "classmethod", "property", "staticmethod")
_KINDS = griffe.ParameterKind
# An import of a program on a page, at a prompt or not.
_ON_PAGES = re.compile(r"^(?:>>> )?from ([\w.]+) import (?:\(([^)]*)\)|(.+))$", re.MULTILINE)
_STARS: dict[griffe.ParameterKind | None, str] = {
    _KINDS.var_positional: "*",
    _KINDS.var_keyword: "**",
}


def load_sources(sources: Iterable[Path]) -> griffe.ModulesCollection:
    """Return the modules of every package below `sources`, which are folders of import names."""
    folders = list(sources)
    loader = griffe.GriffeLoader(search_paths=folders, allow_inspection=False)
    for folder in folders:
        for package in sorted(folder.glob("*/__init__.py")):
            loader.load(package.parent.name)
    loader.resolve_aliases(external=False)
    return loader.modules_collection


def workspace_sources() -> list[Path]:
    """Return the folders that the packages of the workspace are imported from."""
    return [ROOT / "packages" / name / "src" for name in PYPROJECTS]


def public_modules(package: str) -> list[str]:
    """Return the modules of a package that others may import from, the package itself first."""
    inside: list[str] = PYPROJECTS[package].get("tool", {}).get("surface", {}).get("modules", [])
    return [import_name(package), *(f"{import_name(package)}.{name}" for name in inside)]


def describe_modules(modules: griffe.ModulesCollection, names: Iterable[str]) -> list[str]:
    """Return a line for every public name of the modules, sorted."""
    lines: set[str] = set()
    for name in names:
        module = modules[name]
        for member, held in module.members.items():
            if _is_public(module, member, held):
                lines |= set(_describe(f"{name}.{member}", held))
    return sorted(lines)


def _is_public(module: griffe.Module, name: str, held: griffe.Object | griffe.Alias) -> bool:
    if module.exports is not None:
        return name in module.exports
    return not (name.startswith("_") or held.is_alias or held.is_module)


def _describe(path: str, held: griffe.Object | griffe.Alias) -> Iterator[str]:
    if isinstance(held, griffe.Alias) and not _is_inside(held):
        yield f"{path}: from {held.target_path}"
        return
    target = _final(held)
    if isinstance(target, griffe.Class):
        yield _describe_class(path, target)
        for name, member in _class_members(target).items():
            yield from _describe(f"{path}.{name}", member)
    elif isinstance(target, griffe.Function):
        yield _describe_function(path, target)
    elif isinstance(target, griffe.Attribute):
        yield _describe_attribute(path, target)


def _is_inside(alias: griffe.Alias) -> bool:
    """Return whether an alias leads to something that was loaded."""
    return alias.target_path.partition(".")[0] in alias.modules_collection.members


def _final(held: griffe.Object | griffe.Alias) -> griffe.Object:
    return held.final_target if isinstance(held, griffe.Alias) else held


def _class_members(owner: griffe.Class) -> dict[str, griffe.Object | griffe.Alias]:
    """Return the public members of a class, those of bases in the same package among them.

    What comes from another package stands in that one's list, if it is public there.
    """
    package = owner.path.partition(".")[0]
    inherited = {
        name: member
        for name, member in owner.inherited_members.items()
        if _final(member).path.partition(".")[0] == package
    }
    members = {**inherited, **owner.members}
    return {
        name: member
        for name, member in members.items()
        if not name.startswith("_") or (name.endswith("__") and member.is_function)
    }


def _describe_class(path: str, owner: griffe.Class) -> str:
    keywords = (f"{name}={value}" for name, value in owner.keywords.items())
    heads = ", ".join([*(str(base) for base in owner.bases), *keywords])
    # How a dataclass is compared, hashed and written to is part of what its users rely on.
    decorators = (str(decorator.value) for decorator in owner.decorators)
    marks = "".join(f" @{text}" for text in decorators if text.startswith("dataclass"))
    return f"{path}: class({heads}){marks}"


def _describe_function(path: str, function: griffe.Function) -> str:
    returns = f" -> {function.returns}" if function.returns is not None else ""
    return f"{path}({', '.join(_parameters(function))}){returns}{_marks(function)}"


def _describe_attribute(path: str, attribute: griffe.Attribute) -> str:
    annotation = f": {attribute.annotation}" if attribute.annotation is not None else ""
    # A field's default is part of how the class is called; a constant's value is not.
    is_default = attribute.parent is not None and attribute.parent.is_class
    is_default = is_default and "class-attribute" in attribute.labels
    value = f" = {attribute.value}" if is_default and attribute.value is not None else ""
    return f"{path}{annotation}{value}{_marks(attribute)}"


def _marks(held: griffe.Object) -> str:
    return "".join(f" @{mark}" for mark in _MARKS if mark in held.labels)


def _parameters(function: griffe.Function) -> Iterator[str]:
    """Yield the parameters as they stand between the parentheses, `self` and `cls` left out."""
    parameters = list(function.parameters)
    if function.parent is not None and function.parent.is_class:
        is_static = "staticmethod" in function.labels
        parameters = parameters if is_static else parameters[1:]
    starred = False
    for position, parameter in enumerate(parameters):
        starred = starred or parameter.kind is _KINDS.var_positional
        if parameter.kind is _KINDS.keyword_only and not starred:
            yield "*"
            starred = True
        yield _parameter(parameter)
        following = parameters[position + 1 : position + 2]
        if parameter.kind is _KINDS.positional_only and (
            not following or following[0].kind is not _KINDS.positional_only
        ):
            yield "/"


def _parameter(parameter: griffe.Parameter) -> str:
    stars = _STARS.get(parameter.kind, "")
    text = f"{stars}{parameter.name}"
    if parameter.annotation is not None:
        text += f": {parameter.annotation}"
    if parameter.default is not None and not stars:
        text += f" = {parameter.default}" if parameter.annotation else f"={parameter.default}"
    return text


def used_from_outside(package: str) -> set[str]:
    """Return what others import from this package, by full name.

    Others are the sources of the other packages and of the examples, and the programs of the
    documentation.
    """
    own = import_name(package)
    names: set[str] = set()
    for sources in [*workspace_sources(), *ROOT.glob("examples/*/src")]:
        for path in sorted(sources.rglob("*.py")):
            if own not in path.relative_to(sources).parts:
                names |= {name for name in _imported(path) if name.partition(".")[0] == own}
    for page in [*ROOT.glob("*.md"), *ROOT.glob("*/*/README.md"), *ROOT.glob("docs/**/*.md")]:
        names |= set(_imported_on(page.read_text(), own))
    return names


@functools.cache
def _imported(path: Path) -> list[str]:
    """Return the modules and names in modules that a file imports, once for all packages."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names if "." in alias.name]
    return names


def _imported_on(page: str, package: str) -> Iterator[str]:
    for module, several, line in _ON_PAGES.findall(page):
        if module.split(".")[0] == package:
            imported = (several or line).replace("...", "").split(",")
            yield from (f"{module}.{name.split()[0]}" for name in imported if name.strip())


def undeclared(package: str, lines: Iterable[str]) -> list[str]:
    """Return what others import from this package although its list does not hold it."""
    listed = {line.split("(")[0].split(":")[0] for line in lines}
    return sorted(used_from_outside(package) - listed - set(public_modules(package)))
