"""From the command line and a YAML file to a checked `RunConfig`, and back to YAML."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from rl_policy.config.policy import BUILTIN_MODEL, merge_policy, merge_sections
from rl_policy.config.sections import BUILTIN_RUN, DEFAULT_POLICY, Recipe, RunConfig


def load_run_config(
    recipe: Recipe, *, path: Path | None = None, overrides: Sequence[str] = ()
) -> RunConfig:
    """Return the configuration of a new run.

    Args:
        recipe: The command.
        path: A YAML file.
        overrides: `section.key=value`, the value in YAML; they go over the file.

    Raises:
        ValueError: The file cannot be read, or what it says is wrong; one line that names the key.
    """
    given = read_yaml(path) if path is not None else {}
    given = merge_sections(given, parse_overrides(overrides))
    if given.setdefault("recipe", recipe) != recipe:
        raise ValueError(f"recipe={given['recipe']!r} contradicts the command {recipe!r}")
    return parse_run_config(_complete(given))


def parse_run_config(given: Mapping[str, Any]) -> RunConfig:
    """Return `given`, checked, with the defaults of `RunConfig` alone.

    Raises:
        ValueError: What is wrong, in one line.
    """
    try:
        return RunConfig.model_validate(dict(given))
    except ValidationError as error:
        raise ValueError(_describe(error)) from None


def override_resumed(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration of a run that goes on, with what may change without consequences.

    Args:
        config: Of the run.
        overrides: `section.key=value`; `grpo.steps`, `sft.steps` and `checkpoint.*`.

    Raises:
        ValueError: Another key, or a wrong value.
    """
    for override in overrides:
        key = override.partition("=")[0]
        if key not in ("grpo.steps", "sft.steps") and not key.startswith("checkpoint."):
            raise ValueError(
                f"{key} cannot change in a run that goes on: only grpo.steps, sft.steps and "
                "checkpoint.* can"
            )
    return parse_run_config(merge_sections(config.model_dump(), parse_overrides(overrides)))


def read_yaml(path: Path) -> dict[str, Any]:
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


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return what `section.key=value` arguments say, as nested mappings.

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
    """Return the configuration as YAML, each key under a comment that says what it is."""
    return "\n".join(_render(config, indent="")) + "\n"


def _complete(given: dict[str, Any]) -> dict[str, Any]:
    policy = given.get("policy") or {}
    if not isinstance(policy, Mapping):
        raise ValueError(f"policy must be a mapping, got {type(policy).__name__} {policy!r}")
    name = policy.get("model_name")
    is_builtin = name is None or name == BUILTIN_MODEL
    preset = BUILTIN_RUN if is_builtin else {}
    base = merge_policy(DEFAULT_POLICY, preset.get("policy", {}))
    complete = merge_sections({**preset, "policy": {}}, given)
    complete["policy"] = merge_policy(base, policy)
    complete["policy"].setdefault("seed", given.get("seed", RunConfig.model_fields["seed"].default))
    if is_builtin:
        complete["policy"]["model_name"] = BUILTIN_MODEL
    return complete


def _describe(error: ValidationError) -> str:
    return "; ".join(_describe_one(dict(entry)) for entry in error.errors(include_url=False))


def _describe_one(entry: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in entry["loc"])
    if entry["type"] == "value_error":  # raised by our own checks, which name the key themselves
        return str(entry["ctx"]["error"])
    if entry["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(entry["loc"][-1]), _keys_beside(entry["loc"]), n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        return f"{key} is not a known key{hint}"
    message = str(entry["msg"])
    return f"{key}={entry['input']!r}: {message[:1].lower()}{message[1:]}"


def _keys_beside(location: tuple[Any, ...]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for part in location[:-1]:
        inner = model.model_fields[str(part)].annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return list(model.model_fields)


def _render(section: BaseModel, *, indent: str) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            summary = (type(value).__doc__ or "").strip()
            yield from ("", *_comment(summary, indent=indent), f"{indent}{name}:")
            yield from _render(value, indent=indent + "  ")
            continue
        yield from _comment(field.description or "", indent=indent)
        text = yaml.safe_dump({name: value}, sort_keys=False)
        yield from (indent + line for line in text.rstrip().splitlines())


def _comment(text: str, *, indent: str) -> Iterator[str]:
    return (f"{indent}# {line.strip()}" for line in text.splitlines())


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
