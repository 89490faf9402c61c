"""From files, overrides and nested settings to a checked `RunConfig`, and back to YAML."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from rl_interfaces.config.resolve import merge_sections

from rl_policy.config.overrides import add_arithmetic, parse_overrides
from rl_policy.config.policy import (
    BUILTIN_MODEL,
    BUILTIN_POLICY,
    DEFAULT_POLICY,
    Settings,
    merge_policy,
)
from rl_policy.config.sections import EXACT_MATCH, RunConfig, SectionT, run_config_type
from rl_policy.data.rewards import GivenReward
from rl_policy.data.rows import GivenRows
from rl_policy.environments.pool import GivenEnvironment
from rl_policy.recipes import Recipe, find_recipe, installed_recipes

# Keys that leave the steps taken so far valid, beside the numbers of steps and `checkpoint.*`.
_OF_THE_MACHINE = ("cluster.restarts", "cluster.fork_workers", "logger")


def load_run_config(
    recipe: str, *, path: Path | None = None, overrides: Sequence[str] = ()
) -> RunConfig:
    """Return the configuration of a new run.

    Args:
        recipe: The command.
        path: A YAML file. It may hold sections of other installed recipes, so that one file serves
            several commands; those are checked for keys and types only.
        overrides: `section.key=value`, see `parse_overrides`; they take precedence over the file.

    Raises:
        ValueError: The file cannot be read, or its content is wrong; one line that names the key.
    """
    given = read_yaml(path) if path is not None else {}
    return new_run_config(recipe, merge_sections(given, parse_run_overrides(recipe, overrides)))


def parse_run_overrides(recipe: str, overrides: Sequence[str]) -> Settings:
    """Return `section.key=value` arguments for a run as nested mappings, see `parse_overrides`.

    Args:
        recipe: The command.
        overrides: The arguments.

    Raises:
        ValueError: An argument cannot be read; one line that names the key.
    """
    sections = {each.partition("=")[0].partition(".")[0]: None for each in overrides}
    return parse_overrides(overrides, _config_type(find_recipe(recipe), sections))


def new_run_config(recipe: str, given: Mapping[str, object]) -> RunConfig:
    """Return the configuration of a new run, with the command line's defaults for missing keys.

    Args:
        recipe: The command.
        given: Sections; they may be of other installed recipes, as in `load_run_config`.

    Raises:
        ValueError: Names the key and the value, in one line.
    """
    given = dict(given)
    if given.setdefault("recipe", recipe) != recipe:
        raise ValueError(f"recipe={given['recipe']!r} contradicts the command {recipe!r}")
    return parse_run_config(_add_defaults(given, find_recipe(recipe)))


def parse_run_config(given: Mapping[str, object]) -> RunConfig:
    """Return the checked configuration, with the sections' own defaults for missing keys.

    Raises:
        ValueError: Names the key and the value, in one line.
    """
    recipe = given.get("recipe")
    if not isinstance(recipe, str):
        raise ValueError(f"recipe={recipe!r} must be the name of a recipe")
    given = find_recipe(recipe).expand(dict(given))
    kind = _config_type(find_recipe(recipe), given)
    return parse_section(kind, given)


def parse_section(kind: type[SectionT], given: Mapping[str, object]) -> SectionT:
    """Return checked settings, with defaults for missing keys.

    Args:
        kind: What they are of: a run, or whatever has sections.
        given: Nested settings.

    Raises:
        ValueError: Names the key and the value, in one line.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        entries = error.errors(include_url=False)
        raise ValueError("; ".join(_describe(entry, kind) for entry in entries)) from None


def parse_server(
    kind: type[SectionT], *, model: str, path: Path | None, overrides: Sequence[str], base: Settings
) -> SectionT:
    """Return the configuration of a server, whose model its command names.

    Args:
        kind: With a section `policy`.
        model: The command's first argument.
        path: A YAML file.
        overrides: `section.key=value`, over the file.
        base: What is given less than the file.

    Raises:
        ValueError: Names the key and the value, in one line.
    """
    overriding = parse_overrides(overrides, kind)
    given = merge_sections({} if path is None else read_yaml(path), overriding)
    config = parse_section(kind, merge_sections(base, given))
    policy = getattr(config, "policy", {})
    if "model_name" in policy:
        raise ValueError(
            f"policy.model_name={policy['model_name']!r}: the model is the command's first "
            f"argument, {model!r}"
        )
    return config


def override_resumed(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration of a resumed run.

    Args:
        config: That of the interrupted run.
        overrides: `section.key=value`; only the recipe's numbers of steps, `cluster.restarts`,
            `cluster.fork_workers`, `logger` and `checkpoint.*`, which leave the steps taken so far
            valid.

    Raises:
        ValueError: Another key, or an invalid value.
    """
    return override_resumed_with(config, parse_overrides(overrides, type(config)))


def override_resumed_with(config: RunConfig, given: Mapping[str, object]) -> RunConfig:
    """Return the same for nested settings.

    Raises:
        ValueError: As `override_resumed`.
    """
    allowed = [*find_recipe(config.recipe).step_keys, *_OF_THE_MACHINE]
    for key in flatten(given):
        if key not in allowed and not key.startswith("checkpoint."):
            raise ValueError(
                f"{key} cannot change when a run is resumed: only {', '.join(allowed)} and "
                "checkpoint.* can"
            )
    return parse_run_config(merge_sections(config.model_dump(), given))


def read_yaml(path: Path) -> Settings:
    """Return the mapping in a YAML file.

    Raises:
        ValueError: The file cannot be read or holds no mapping; names the file.
    """
    add_arithmetic()
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except RecursionError:
        raise ValueError(f"cannot read the config {path}: it is nested too deeply") from None
    # ValueError: bytes that are no UTF-8, a null byte in the path, a number of 5000 digits.
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"cannot read the config {path}: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"the config {path} must hold a mapping")
    return {str(key): value for key, value in content.items()}


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted key, as the command line takes them.

    Example:
        flatten({"grpo": {"steps": 3}}) -> {"grpo.steps": 3}
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def nest(settings: Mapping[str, Any]) -> Settings:
    """Return settings with dotted keys, in whatever depth, as nested ones.

    Example:
        nest({"grpo.steps": 2, "grpo": {"epochs_per_step": 3}})
        -> {"grpo": {"steps": 2, "epochs_per_step": 3}}

    Raises:
        ValueError: A key is given twice.
    """
    nested: Settings = {}
    for key, value in settings.items():
        inner: Any = nest(value) if isinstance(value, Mapping) else value
        for part in reversed(str(key).split(".")):
            inner = {part: inner}
        nested = join_settings(nested, inner)
    return nested


def join_settings(first: Settings, second: Settings, *, path: str = "") -> Settings:
    """Return the keys of both.

    Args:
        first: Nested settings.
        second: Others.
        path: Prefix of their keys in errors.

    Raises:
        ValueError: Both have a key.
    """
    for key in first.keys() & second.keys():
        if not (isinstance(first[key], Mapping) and isinstance(second[key], Mapping)):
            raise ValueError(
                f"{path}{key} is given twice, as {_plain(first[key])!r} and "
                f"{_plain(second[key])!r}: give it once"
            )
        join_settings(first[key], second[key], path=f"{path}{key}.")
    return merge_sections(first, second)


def render_run_config(config: RunConfig) -> str:
    """Return the configuration as YAML, with a comment above each key."""
    return "\n".join(_render(config, indent="")) + "\n"


def _add_defaults(given: Settings, recipe: Recipe) -> Settings:
    """Return `given` over the defaults of `policy` and, if it is used, the built-in model's."""
    policy = given.get("policy") or {}
    if not isinstance(policy, Mapping):
        raise ValueError(f"policy must be a mapping, got {type(policy).__name__} {policy!r}")
    is_builtin = policy.get("model_name") in (None, BUILTIN_MODEL)
    layers = [recipe.defaults]
    if is_builtin:
        layers += [BUILTIN_POLICY, recipe.builtin.get("policy", {})]
    base = DEFAULT_POLICY
    for layer in layers:
        base = merge_policy(base, layer)
    complete = merge_sections({**(recipe.builtin if is_builtin else {}), "policy": {}}, given)
    reward, sft = given.get("reward"), given.get("sft")
    functions = reward.get("function") if isinstance(reward, Mapping) else None
    is_chosen = isinstance(sft, Mapping) and "stop_pass_rate" in sft
    has_default = is_builtin and "sft" in recipe.builtin and not is_chosen
    if has_default and functions not in (None, EXACT_MATCH, [EXACT_MATCH]):
        # The built-in model's own default is for the reward that is a share of solved problems.
        complete["sft"] = merge_sections(complete.get("sft") or {}, {"stop_pass_rate": None})
    complete["policy"] = merge_policy(base, policy)
    complete["policy"].setdefault("seed", given.get("seed", RunConfig.model_fields["seed"].default))
    if is_builtin:
        complete["policy"]["model_name"] = BUILTIN_MODEL
    return complete


def _config_type(recipe: Recipe, given: Mapping[str, object]) -> type[RunConfig]:
    """Return the type of a run's configuration, with the given sections of other recipes too.

    Another recipe may not be importable, so it is imported only if a key is unknown without it.
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


def _describe(entry: ErrorDetails, kind: type[BaseModel]) -> str:
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
    """Return the known keys of the section in which an unknown key was found."""
    for part in location[:-1]:
        inner = kind.model_fields[str(part)].annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        kind = inner
    known = list(kind.model_fields)
    return [*known, *installed_recipes()] if issubclass(kind, RunConfig) else known


def _render(section: BaseModel, *, indent: str) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            summary = (type(value).__doc__ or "").strip()
            yield from ("", *_comment(summary, indent=indent), f"{indent}{name}:")
            yield from _render(value, indent=indent + "  ")
            continue
        yield from _comment(field.description or "", indent=indent)
        text = cast(str, yaml.safe_dump({name: _plain(value)}, sort_keys=False))
        yield from (indent + line for line in text.rstrip().splitlines())


def _plain(value: Any) -> Any:
    """Return a value with a name in place of what Python gave."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    is_given = isinstance(value, GivenRows | GivenReward | GivenEnvironment)
    return str(value) if is_given else value


def _comment(text: str, *, indent: str) -> Iterator[str]:
    return (f"{indent}# {line.strip()}" for line in text.splitlines())


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
