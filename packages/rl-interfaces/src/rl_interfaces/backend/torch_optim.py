"""Optimizers and schedules of torch by dotted name: parsed, and tried on two small parameters.

    policy.optimizer, policy.scheduler --parse--> ClassConfig, SchedulerConfig --try_steps--> steps

What an optimizer makes of its arguments, it alone knows: some are refused when it is built, some by
its first step, and some turn parameters into NaN. All of that takes milliseconds here, before a
process starts.
"""

from __future__ import annotations

import importlib
import inspect
import math
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, SequentialLR

from rl_interfaces.config.schema import check_type
from rl_interfaces.config.types import ResolvedConfig

# Steps of a scheduler that are tried at most: hundredths of a second.
_MOST_STEPS = 2000
# Of the last scheduler, which has no end.
_LAST_STEPS = 3
# Of a whole run, which take a second; longer ones are checked in part.
_MOST_RUN_STEPS = 100_000
_START = 0.5
# A thousand times the start: no model is left after a step of that size.
_LARGEST = 500.0
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassConfig:
    """A class by dotted name, and its keyword arguments."""

    cls: Callable[..., Any]
    kwargs: dict[str, object]
    name: str
    """The dotted name, as the configuration has it."""
    path: str
    """Its key, for error messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Schedulers in sequence; the next one takes over at each milestone."""

    parts: tuple[ClassConfig, ...]
    milestones: tuple[int, ...]


def parse_optimizer(section: ResolvedConfig, *, path: str = "policy.optimizer") -> ClassConfig:
    """Return the optimizer of a section.

    Args:
        section: With the key `name` and, if there are any, `kwargs`.
        path: Its key, for error messages.

    Raises:
        ValueError: The name is no optimizer's, or a keyword argument is unknown or of a wrong type.
    """
    return _parse_class(section, base=torch.optim.Optimizer, argument=[], path=path)


def parse_scheduler(
    given: ResolvedConfig | list[ResolvedConfig] | None, *, path: str = "policy.scheduler"
) -> SchedulerConfig | None:
    """Return the schedule of a section, None for a constant rate.

    Args:
        given: A section, or a list of them of which one may be `{"milestones": [...]}`.
        path: Its key, for error messages.

    Raises:
        ValueError: Schedulers and milestones do not fit together, or as in `parse_optimizer`.
    """
    if given is None:
        return None
    entries = given if isinstance(given, list) else [given]
    milestones = [entry["milestones"] for entry in entries if "milestones" in entry]
    parts = {i: entry for i, entry in enumerate(entries) if "milestones" not in entry}
    flat = tuple(milestones[0]) if milestones else ()
    if len(milestones) > 1:
        raise ValueError(f"{path} has {len(milestones)} entries with milestones, at most 1 is read")
    if len(parts) != len(flat) + 1:
        raise ValueError(
            f"{path} has {len(parts)} schedulers and milestones {list(flat)}: "
            f"{len(parts)} schedulers need {max(len(parts) - 1, 0)} milestones"
        )
    if list(flat) != sorted(set(flat)):
        raise ValueError(f"{path} milestones {list(flat)} must rise")
    probe = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    parsed = [
        _parse_class(
            part,
            base=LRScheduler,
            argument=probe,
            path=f"{path}[{index}]" if isinstance(given, list) else path,
        )
        for index, part in parts.items()
    ]
    return SchedulerConfig(parts=tuple(parsed), milestones=flat)


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: SchedulerConfig | None
) -> LRScheduler:
    """Return the learning-rate schedule, which steps once per `train` call; constant for None."""
    if config is None:
        return LambdaLR(optimizer, _constant)
    parts = [part.cls(optimizer, **part.kwargs) for part in config.parts]
    if len(parts) == 1:
        return parts[0]
    return SequentialLR(optimizer, parts, milestones=list(config.milestones))


def try_steps(optimizer: ClassConfig, scheduler: SchedulerConfig | None) -> None:
    """Build optimizer and schedule over a matrix and a vector, and take steps with both.

    Raises:
        ValueError: One cannot be built or cannot step, or a step leaves a parameter or a learning
            rate that is not finite; the message names the key.
    """
    parameters = [torch.nn.Parameter(torch.full(shape, _START)) for shape in ((4, 4), (4,))]
    try:
        built = optimizer.cls(parameters, **optimizer.kwargs)
    except Exception as error:
        raise _refusal(optimizer, _culprit(optimizer, parameters), error) from error
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.25)
    try:
        built.step()
    except Exception as error:
        raise ValueError(
            f"{optimizer.path}.name={optimizer.name!r} cannot train a policy, whose gradients "
            f"are dense and computed before the step: {_one_line(error)}"
        ) from error
    largest = max(float(parameter.detach().abs().max()) for parameter in parameters)
    if not largest < _LARGEST:
        raise ValueError(
            f"{optimizer.path}.kwargs={optimizer.kwargs}: the first step takes a parameter from "
            f"{_START} to {largest:g} in size"
        )
    if scheduler is not None:
        _try_schedule(built, scheduler)


def _try_schedule(optimizer: torch.optim.Optimizer, config: SchedulerConfig) -> None:
    """Step each scheduler to its milestone, the last one a few times, then all of them together."""
    lengths = [
        end - start
        for start, end in zip((0, *config.milestones), (*config.milestones, None), strict=True)
        if end is not None
    ]
    for part, length in zip(config.parts, (*lengths, _LAST_STEPS), strict=True):
        try:
            alone = part.cls(optimizer, **part.kwargs)
            # torch warns of a schedule that steps before its optimizer.
            optimizer.step()
            for step in range(min(length, _MOST_STEPS)):
                alone.step()
                _check_rate(optimizer, step=step + 1)
            for group in optimizer.param_groups:
                # Where the next one starts.
                group["lr"] = group["initial_lr"]
        except Exception as error:
            raise ValueError(
                f"{part.path}.kwargs={part.kwargs} make no schedule of {part.name}: "
                f"{_one_line(error)}"
            ) from error
    build_scheduler(optimizer, config).step()


def check_schedule_length(config: SchedulerConfig, *, num_steps: int, key: str) -> None:
    """Take as many steps of a schedule as a run will, up to a limit.

    Some schedules end: `OneCycleLR` raises at the step after its `total_steps`, which would be
    hours into the run.

    Args:
        config: A schedule that `try_steps` has accepted.
        num_steps: Steps of the run.
        key: The config key that sets them, for the message.

    Raises:
        ValueError: The schedule ends before; the message names both keys and the numbers.
    """
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = build_scheduler(optimizer, config)
    # torch warns of a schedule that steps before its optimizer.
    optimizer.step()
    for step in range(min(num_steps, _MOST_RUN_STEPS)):
        try:
            schedule.step()
        except ValueError as error:
            part = config.parts[sum(step >= milestone for milestone in config.milestones)]
            raise ValueError(
                f"{part.path}.kwargs={part.kwargs}: {part.name} ends after {step} steps, and the "
                f"run takes {num_steps} ({key}): {_one_line(error)}"
            ) from error


class _RateError(ValueError):
    """A schedule gives a rate that no optimizer can use."""


def _check_rate(optimizer: torch.optim.Optimizer, *, step: int) -> None:
    for group in optimizer.param_groups:
        rate = float(group["lr"])
        if not (math.isfinite(rate) and rate >= 0):
            raise _RateError(f"the learning rate after {step} steps is {rate}")


def _parse_class(
    section: ResolvedConfig, *, base: type, argument: object, path: str
) -> ClassConfig:
    """Return the class behind a dotted name, once its signature accepts the keyword arguments."""
    if "name" not in section:
        raise ValueError(f"{path}.name is not set: a dotted name such as torch.optim.AdamW")
    name, kwargs = section["name"], dict(section.get("kwargs", {}))
    module_name, _, class_name = name.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}.name={name!r} cannot be imported: {error}") from error
    if not (inspect.isclass(cls) and issubclass(cls, base)):
        raise ValueError(f"{path}.name={name!r} is not a {base.__name__}")
    try:
        inspect.signature(cls).bind(argument, **kwargs)
    except TypeError as error:
        raise ValueError(f"{path}.kwargs={kwargs} do not fit {name}: {error}") from error
    for key, value in kwargs.items():
        _check_finite(value, path=f"{path}.kwargs.{key}")
    for key, expected in _plain_hints(cls):
        if key in kwargs:
            check_type(kwargs[key], expected, path=f"{path}.kwargs.{key}")
    return ClassConfig(cls=cls, kwargs=kwargs, name=name, path=path)


def _plain_hints(cls: type) -> Iterator[tuple[str, object]]:
    """Yield the arguments whose declared types are those of YAML: `fused: bool | None`."""
    try:
        hints = get_type_hints(cls.__init__)
    except (NameError, TypeError):
        # A third party's class may name types that are there for a type checker alone.
        return
    for key, hint in hints.items():
        is_union = get_origin(hint) in (Union, types.UnionType)
        if all(member in _PLAIN for member in (get_args(hint) if is_union else (hint,))):
            yield key, hint


def _check_finite(value: object, *, path: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path}={value} must be finite")
    if isinstance(value, (list, tuple)):
        for index, entry in enumerate(cast("list[object]", value)):
            _check_finite(entry, path=f"{path}[{index}]")
    if isinstance(value, Mapping):
        for key, entry in cast("Mapping[str, object]", value).items():
            _check_finite(entry, path=f"{path}.{key}")


def _culprit(config: ClassConfig, parameters: list[torch.nn.Parameter]) -> str | None:
    """Return the keyword argument that is refused on its own, if one is."""
    for key, value in config.kwargs.items():
        try:
            config.cls(parameters, **{key: value})
        except Exception:  # whatever a third party's class raises: it is raised again by the caller
            return key
    return None


def _refusal(config: ClassConfig, key: str | None, error: Exception) -> ValueError:
    given = f"={config.kwargs}" if key is None else f".{key}={config.kwargs[key]!r}"
    return ValueError(
        f"{config.path}.kwargs{given} is refused by {config.name}: {_one_line(error)}"
    )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, _RateError) else f"{type(error).__name__}: {text}"


def _constant(step: int) -> float:
    return 1.0
