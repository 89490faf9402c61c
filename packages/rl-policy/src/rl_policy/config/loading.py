"""From the command line and a YAML file to a checked `RunConfig`, and back to YAML."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rl_policy.config.policy import (
    BUILTIN_MODEL,
    BUILTIN_POLICY,
    DEFAULT_POLICY,
    Settings,
    merge_policy,
    merge_sections,
)
from rl_policy.config.sections import RunConfig, run_config_type
from rl_policy.recipes import Recipe, find_recipe, installed_recipes


def load_run_config(
    recipe: str, *, path: Path | None = None, overrides: Sequence[str] = ()
) -> RunConfig:
    """Return the configuration of a new run.

    Args:
        recipe: The command.
        path: A YAML file. It may hold sections of other installed recipes, so that one file serves
            several commands; those are checked for keys and types alone.
        overrides: `section.key=value`, the value in YAML; they take precedence over the file.

    Raises:
        ValueError: The file cannot be read, or its content is wrong; one line that names the key.
    """
    given = read_yaml(path) if path is not None else {}
    given = merge_sections(given, parse_overrides(overrides))
    if given.setdefault("recipe", recipe) != recipe:
        raise ValueError(f"recipe={given['recipe']!r} contradicts the command {recipe!r}")
    return parse_run_config(_add_defaults(given, find_recipe(recipe)))


def parse_run_config(given: Mapping[str, object]) -> RunConfig:
    """Return `given`, checked, with no defaults but those of the sections.

    Raises:
        ValueError: What is wrong, in one line.
    """
    recipe = given.get("recipe")
    if not isinstance(recipe, str):
        raise ValueError(f"recipe={recipe!r} must be the name of a recipe")
    kind = _config_type(find_recipe(recipe), given)
    try:
        return kind.model_validate(dict(given))
    except ValidationError as error:
        entries = error.errors(include_url=False)
        raise ValueError("; ".join(_describe(entry, kind) for entry in entries)) from None


def override_resumed(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration of a resumed run, with what may change without consequences.

    Args:
        config: Of the run.
        overrides: `section.key=value`; the recipe's numbers of steps, and `checkpoint.*`.

    Raises:
        ValueError: Another key, or a wrong value.
    """
    allowed = find_recipe(config.recipe).step_keys
    for override in overrides:
        key = override.partition("=")[0]
        if key not in allowed and not key.startswith("checkpoint."):
            raise ValueError(
                f"{key} cannot change when a run is resumed: only {', '.join(allowed)} and "
                "checkpoint.* can"
            )
    return parse_run_config(merge_sections(config.model_dump(), parse_overrides(overrides)))


def read_yaml(path: Path) -> Settings:
    """Return the mapping that a YAML file holds.

    Raises:
        ValueError: There is no such file, or it is no YAML mapping; the message names the file.
    """
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"cannot read the config {path}: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"the config {path} must hold a mapping")
    return {str(key): value for key, value in content.items()}


def parse_overrides(overrides: Sequence[str]) -> Settings:
    """Return `section.key=value` arguments as nested mappings.

    Raises:
        ValueError: An argument has no `=`, or a value is no YAML.
    """
    for override in overrides:
        if "=" not in override.removeprefix("="):
            raise ValueError(f"cannot read {override!r}: expected section.key=value")
    try:
        content = OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides)), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"cannot read {' '.join(overrides)}: {_one_line(error)}") from error
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def render_run_config(config: RunConfig) -> str:
    """Return the configuration as YAML, each key below a comment with its meaning."""
    return "\n".join(_render(config, indent="")) + "\n"


def _add_defaults(given: Settings, recipe: Recipe) -> Settings:
    """Return `given` over the defaults of `policy`, and over what the built-in model needs."""
    policy = given.get("policy") or {}
    if not isinstance(policy, Mapping):
        raise ValueError(f"policy must be a mapping, got {type(policy).__name__} {policy!r}")
    is_builtin = policy.get("model_name") in (None, BUILTIN_MODEL)
    layers = [BUILTIN_POLICY, recipe.builtin.get("policy", {})] if is_builtin else []
    base = DEFAULT_POLICY
    for layer in layers:
        base = merge_policy(base, layer)
    complete = merge_sections({**(recipe.builtin if is_builtin else {}), "policy": {}}, given)
    complete["policy"] = merge_policy(base, policy)
    complete["policy"].setdefault("seed", given.get("seed", RunConfig.model_fields["seed"].default))
    if is_builtin:
        complete["policy"]["model_name"] = BUILTIN_MODEL
    return complete


def _config_type(recipe: Recipe, given: Mapping[str, object]) -> type[RunConfig]:
    """Return the type of a run's configuration: the recipe's sections, and others that are given.

    Other recipes are imported only if a key is unknown without them.
    """
    sections = dict(recipe.sections)
    unknown = given.keys() - RunConfig.model_fields.keys() - sections.keys()
    for name in installed_recipes():
        if not unknown:
            break
        for key, kind in find_recipe(name).sections.items():
            if key in unknown:
                sections[key] = kind
                unknown.remove(key)
    return run_config_type(sections)


def _describe(entry: ErrorDetails, kind: type[RunConfig]) -> str:
    key = ".".join(str(part) for part in entry["loc"])
    if entry["type"] == "value_error":  # raised by our own checks, which name the key themselves
        return str(entry.get("ctx", {})["error"])
    if entry["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(entry["loc"][-1]), _keys_beside(entry["loc"], kind), 1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        return f"{key} is not a known key{hint}"
    message = entry["msg"]
    return f"{key}={entry['input']!r}: {message[:1].lower()}{message[1:]}"


def _keys_beside(location: tuple[int | str, ...], kind: type[BaseModel]) -> list[str]:
    """Return the keys of the section that an unknown key was given in."""
    for part in location[:-1]:
        inner = kind.model_fields[str(part)].annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        kind = inner
    known = list(kind.model_fields)
    return known if len(location) > 1 else [*known, *installed_recipes()]


def _render(section: BaseModel, *, indent: str) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            summary = (type(value).__doc__ or "").strip()
            yield from ("", *_comment(summary, indent=indent), f"{indent}{name}:")
            yield from _render(value, indent=indent + "  ")
            continue
        yield from _comment(field.description or "", indent=indent)
        text = cast(str, yaml.safe_dump({name: value}, sort_keys=False))
        yield from (indent + line for line in text.rstrip().splitlines())


def _comment(text: str, *, indent: str) -> Iterator[str]:
    return (f"{indent}# {line.strip()}" for line in text.splitlines())


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
