"""Writes the tables of the configuration reference from the code that reads the configuration.

A line `{{ table: MODULE.CLASS DEFAULTS }}` of a page becomes a table of the keys of a TypedDict, a
dataclass or a pydantic model. `DEFAULTS` is where a TypedDict's defaults stand: `module:NAME`,
followed by `.key` for those of a section.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import griffe
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

_MARKER = re.compile(r"^\{\{ table: ([\w.]+)(?: ([\w.:]+))? \}\}$", flags=re.MULTILINE)
_NONE = "none"


class Key(NamedTuple):
    """A row of a table."""

    name: str
    type: str
    default: str
    meaning: str


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Replace every marker of a page by its table."""
    return _MARKER.sub(lambda found: table(*found.groups()), markdown)


def table(path: str, defaults: str | None) -> str:
    """Return the table of a class.

    Args:
        path: Its dotted path.
        defaults: Where the defaults of a TypedDict stand; None where they are the class's own.

    Raises:
        ValueError: The class has no key, or a default belongs to none.
    """
    module, _, name = path.rpartition(".")
    kind = getattr(import_module(module), name)
    if issubclass(kind, BaseModel):
        keys = list(keys_of_model(kind))
    elif is_dataclass(kind):
        keys = keys_of_class(module, name, asdict(kind()))
    else:
        keys = keys_of_class(module, name, {} if defaults is None else lookup(defaults))
    if not keys:
        raise ValueError(f"{path} has no keys")
    lines = ["| key | type | default | what it says |", "|---|---|---|---|"]
    lines += [
        f"| `{key.name}` | `{key.type}` | {key.default} | {escape(key.meaning)} |" for key in keys
    ]
    return "\n".join(lines)


def keys_of_model(kind: type[BaseModel]) -> Iterator[Key]:
    """Yield the fields of a pydantic model that have a description."""
    for name, field in kind.model_fields.items():
        if field.description is None:
            continue
        default = field.default
        if field.default_factory is not None:
            default = field.default_factory()  # pyright: ignore[reportCallIssue]
        shown = "required" if default is PydanticUndefined else code(default)
        yield Key(name, annotation(field.annotation), shown, field.description)


def keys_of_class(module: str, name: str, defaults: Mapping[str, Any]) -> list[Key]:
    """Return the keys of a TypedDict or dataclass, with the docstrings below them in the source."""
    source = griffe.visit(
        module, filepath=Path(), code=Path(str(import_module(module).__file__)).read_text()
    )
    members = source.classes[name].attributes
    unknown = set(defaults) - set(members)
    if unknown:
        raise ValueError(f"defaults for {sorted(unknown)}, which {name} does not have")
    keys: list[Key] = []
    for key, member in members.items():
        written = re.sub(r"^NotRequired\[(.*)\]$", r"\1", str(member.annotation))
        meaning = member.docstring.value if member.docstring else ""
        shown = without_aliases(written, module)
        keys.append(Key(key, shown, shown_default(defaults, key, written), meaning))
    return keys


def without_aliases(written: str, module: str) -> str:
    """Return a type with what each name of a range stands for: `int >= 1` for `Count`.

    Args:
        written: The type, as it is in the source.
        module: Where its names are known.
    """
    names = vars(import_module(module))

    def expanded(found: re.Match[str]) -> str:
        kind = names.get(found[0])
        if get_origin(kind) is not Annotated:
            return found[0]
        base, *rules = get_args(kind)
        return " ".join(filter(None, [annotation(base), *map(str, rules)]))

    return re.sub(r"\b[A-Z]\w+\b", expanded, written)


def shown_default(defaults: Mapping[str, Any], key: str, written: str) -> str:
    """Return a default as a table shows it; that of a section is its own table."""
    if key not in defaults:
        return _NONE
    # A mapping with keys of any name has no table.
    is_section = isinstance(defaults[key], dict) and not written.startswith("dict[")
    return "see below" if is_section else code(defaults[key])


def lookup(place: str) -> Mapping[str, Any]:
    """Return the defaults at `module:NAME.key.key`."""
    module, _, path = place.partition(":")
    name, *keys = path.split(".")
    found = getattr(import_module(module), name)
    for key in keys:
        found = found[key]
    return found


def annotation(kind: Any) -> str:
    """Return a type as one writes it, without its range."""
    if get_origin(kind) is list and get_origin(get_args(kind)[0]) is Annotated:
        kind = list[get_args(get_args(kind)[0])[0]]
    written = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else kind
    return re.sub(r"\b(typing|rl_policy\.config)\.", "", str(written))


def code(value: Any) -> str:
    """Return a value as YAML would be given it."""
    if value is None:
        return _NONE
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text or '{}'}`"


def escape(text: str) -> str:
    """Return text for one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
