"""Run a command of `rl-policy` in this process, as a user's shell does, with a meter on its phases.

    python -m whole_step.own_side PHASES.jsonl grpo ...

The meter is put into modules of `rl_policy` as these are imported: nothing is imported earlier than
without it.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from whole_step.clocks import PhaseMeter

# The names under which a step's stopwatch counts.
PHASES = {
    "move_s": "move",
    "generate_s": "generate",
    # Where TRL computes rewards too.
    "reward_s": "score",
    "logprob_s": "score",
    "train_s": "train",
}


class AfterImport(MetaPathFinder):
    """Calls a function with each of some modules once it is imported.

    Args:
        actions: The functions by the modules' names.
    """

    def __init__(self, actions: dict[str, Callable[[Any], None]]) -> None:
        self._actions = actions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of one of the modules; None for all others."""
        action = self._actions.get(fullname)
        if action is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None, fullname
        assert spec.loader is not None, fullname
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            action(module)

        spec.loader.exec_module = execute_and_act
        return spec


def measure_with(meter: PhaseMeter) -> dict[str, Callable[[Any], None]]:
    """Return what puts the meter into the modules that the phases are in."""

    def into_recipe(module: Any) -> None:
        class Metered(module.Stopwatch):
            @contextmanager
            def phase(self, name: str) -> Iterator[None]:
                if name == "step_s" and not meter.has_begun:
                    meter.end_step(0)
                with super().phase(name):
                    if name not in PHASES:
                        yield
                        return
                    with meter.phase(PHASES[name]):
                        yield

        module.Stopwatch = Metered

    def into_refit(module: Any) -> None:
        refit = module.WeightLink.refit

        def metered(self: Any, version: int) -> Any:
            with meter.phase("refit"):
                return refit(self, version)

        module.WeightLink.refit = metered

    def into_metrics(module: Any) -> None:
        write = module.MetricsLog.write

        def metered(self: Any, metrics: Any) -> None:
            write(self, metrics)
            meter.end_step(metrics.step)

        module.MetricsLog.write = metered

    return {
        "rl_policy.recipes.grpo": into_recipe,
        "rl_policy.refit": into_refit,
        "rl_policy.run.metrics": into_metrics,
    }


if __name__ == "__main__":
    _, phases, *arguments = sys.argv
    sys.meta_path.insert(0, AfterImport(measure_with(PhaseMeter(Path(phases), root=os.getpid()))))
    from rl_policy.cli import main

    sys.argv = ["rl-policy", *arguments]
    main()
