"""Overrides of the command line: `section.key=value`, read by the type of the key.

A key whose value is a text takes it literally: `#`, quotes, brackets and colons are a part of it,
and `null` alone is none. All other values are YAML.
"""

from __future__ import annotations

import math
import re
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel
from rl_interfaces import PolicyConfig
from typing_extensions import is_typeddict

from rl_policy.config.policy import Settings

# What files of NeMo RL compute with: `${mul:${policy.max_total_sequence_length}, 4}`.
_RESOLVERS: Mapping[str, Callable[..., Any]] = {
    "mul": lambda *factors: math.prod(factors),
    "add": lambda *terms: sum(terms),
    "sub": lambda first, second: first - second,
    "div": lambda first, second: first // second,
    "max": max,
    "min": min,
}
# In YAML 1.1, 010 is 8 and 1:30 is 90.
_LEADING_ZEROS = re.compile(r"([-+]?)0+([0-9]+)")
_SEXAGESIMAL = re.compile(r"[-+]?[1-9][0-9_]*(:[0-5]?[0-9])+")
_AT_THE_END = (yaml.BlockEndToken, yaml.StreamEndToken)
_PLACEHOLDER = "<text {}>"


def parse_overrides(overrides: Sequence[str], kind: type[BaseModel] | None = None) -> Settings:
    """Return `section.key=value` arguments as nested mappings.

    Example:
        reward.answer_pattern=#### *(-?[0-9]+)  -> the text after the first =
        data.path=[a.jsonl, b.jsonl]            -> a list, as the key takes a text or a list
        grpo.steps=20                           -> a number

    Args:
        overrides: The arguments.
        kind: What has the keys, whose types say which values are texts. None: no type is known, and
            every value is YAML.

    Raises:
        ValueError: An argument has no `=`, or a value is not YAML; one line that names the key.
    """
    seen: dict[str, str] = {}
    texts: dict[str, str | None] = {}
    prepared: list[str] = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not (key and equals):
            raise ValueError(f"cannot read {override!r}: expected section.key=value")
        if not value.strip():
            raise ValueError(f"{key}= has no value: give one, or {key}=null for none")
        if key in seen:
            raise ValueError(f"{key} is given twice, as {seen[key]} and {override}: give it once")
        seen[key] = override
        is_literal = _is_literal(value, _type_of(key, kind))
        if not is_literal:
            _check_yaml(key, value)
            override = f"{key}={_decimal(value)}"
        elif value != "null":
            placeholder = _PLACEHOLDER.format(len(texts))
            texts[placeholder] = value
            override = f"{key}={placeholder}"
        prepared.append(override)
    given = " ".join(overrides)
    add_arithmetic()
    try:
        content = OmegaConf.to_container(OmegaConf.from_dotlist(prepared), resolve=True)
    except RecursionError:
        raise ValueError(f"cannot read {given[:80]}: it is nested too deeply") from None
    except (AttributeError, TypeError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"cannot read {given}: {' '.join(str(error).split())}") from error
    assert isinstance(content, dict)
    return {str(key): _with_texts(value, texts) for key, value in content.items()}


def add_arithmetic() -> None:
    """Let interpolations of OmegaConf compute: `mul`, `add`, `sub`, `div`, `max` and `min`.

    A resolver that a program has registered under such a name stays.
    """
    with warnings.catch_warnings():
        # Newer versions have another name for it, which older ones lack.
        warnings.simplefilter("ignore", UserWarning)
        for name, resolver in _RESOLVERS.items():
            if not OmegaConf.has_resolver(name):
                OmegaConf.register_new_resolver(name, resolver)


def _with_texts(value: Any, texts: Mapping[str, str | None]) -> Any:
    """Return a value with the texts in place of their placeholders."""
    if isinstance(value, dict):
        settings = cast("dict[str, Any]", value)
        return {key: _with_texts(each, texts) for key, each in settings.items()}
    return texts.get(value, value) if isinstance(value, str) else value


def _is_literal(value: str, hint: Any) -> bool:
    """Return whether a value is a text that is taken as it is.

    Args:
        value: The text after the first `=`.
        hint: The type of the key; None if it is not known.
    """
    members = _members(hint)
    others = [each for each in members if not _is_text(each) and not _is_object(each)]
    if len(members) > len(others) and any(map(_is_text, members)):
        if not others:
            return True
        if all(get_origin(each) is list for each in others):
            return not (value.startswith("[") and value.rstrip().endswith("]"))
    # A text where a text is one of several possibilities: YAML says which one this is.
    may_be_text = hint is None or hint in (Any, object) or any(map(_is_text, members))
    quoted = value.lstrip()[:1] in ("'", '"')
    return may_be_text and not quoted and _reads_as_text(value)


def _reads_as_text(value: str) -> bool:
    try:
        float(value)  # OmegaConf reads 1e-3 as a number, unlike YAML 1.1
    except ValueError:
        pass
    else:
        return False
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        return False
    # A comment alone is a text with a hash in front.
    return "${" not in value and (
        isinstance(parsed, str) or (parsed is None and value.lstrip()[:1] == "#")
    )


def _decimal(value: str) -> str:
    """Return a number without its leading zeros, with which YAML reads it as octal."""
    matched = _LEADING_ZEROS.fullmatch(value.strip())
    return value if matched is None else "".join(matched.groups())


def _check_yaml(key: str, value: str) -> None:
    """Raise `ValueError` if YAML would read something else than what was given."""
    if _SEXAGESIMAL.fullmatch(value.strip()):
        raise ValueError(
            f"{key}={value} would be {yaml.safe_load(value)} in YAML: write it without colons"
        )
    try:
        tokens = [each for each in yaml.scan(value) if not isinstance(each, _AT_THE_END)]
    except yaml.YAMLError:
        return  # the caller reports it
    rest = value[max(each.end_mark.index for each in tokens) :].strip()
    if rest.startswith("#"):
        raise ValueError(
            f"{key}={value}: {rest!r} is a comment in YAML: leave it out, or put quotes around a "
            "text with #"
        )


def _type_of(key: str, kind: Any) -> Any:
    """Return the type of a dotted key; None if it is not known."""
    hint = kind
    for part in key.split("."):
        if hint is None:
            return None
        hint = _type_within(hint, part)
    return hint


def _type_within(hint: Any, name: str) -> Any:
    for member in _members(hint):
        if isinstance(member, type) and issubclass(member, BaseModel):
            field = member.model_fields.get(name)
            if field is None:
                return None
            # A section of overrides of `policy`, such as `sft.policy`.
            is_policy = name.endswith("policy") and get_origin(field.annotation) is dict
            return PolicyConfig if is_policy else field.annotation
        if is_typeddict(member):
            return get_type_hints(member).get(name)
        if get_origin(member) is dict:
            return get_args(member)[1]
    return None


def _members(hint: Any) -> list[Any]:
    """Return the types of a union without None; of any other type, the type itself."""
    if get_origin(hint) is Annotated:
        return _members(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return [each for member in get_args(hint) for each in _members(member)]
    return [] if hint in (None, type(None)) else [hint]


def _is_text(hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return all(isinstance(each, str) for each in get_args(hint))
    return hint in (str, Path)


def _is_object(hint: Any) -> bool:
    """Return whether only Python can give a value, such as a function."""
    return (
        isinstance(hint, type)
        and not is_typeddict(hint)
        and hint not in (int, float, bool, dict, list, object)
        and not issubclass(hint, BaseModel)
    )
