"""The conformance kit: what a backend is held to, as plain functions and as tests of pytest.

Names are loaded when they are asked for: with them comes torch, and with the suites pytest. What
they need is the extra `testing`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_interfaces.testing.report import (
        ConformanceError,
        Outcome,
        Report,
        Rule,
        Status,
        require_conformance,
    )
    from rl_interfaces.testing.worker.case import (
        AdapterCase,
        RewardCase,
        ScheduleCase,
        Tolerances,
        Way,
        WorkerCase,
    )
    from rl_interfaces.testing.worker.kit import WORKER_RULES, WorkerConformance, check_worker

_HOMES = {
    "report": (
        "ConformanceError",
        "Outcome",
        "Report",
        "Rule",
        "Status",
        "require_conformance",
    ),
    "worker.case": (
        "AdapterCase",
        "RewardCase",
        "ScheduleCase",
        "Tolerances",
        "Way",
        "WorkerCase",
    ),
    "worker.kit": ("WORKER_RULES", "WorkerConformance", "check_worker"),
}

__all__ = [
    "WORKER_RULES",
    "AdapterCase",
    "ConformanceError",
    "Outcome",
    "Report",
    "RewardCase",
    "Rule",
    "ScheduleCase",
    "Status",
    "Tolerances",
    "Way",
    "WorkerCase",
    "WorkerConformance",
    "check_worker",
    "require_conformance",
]


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
