"""What the tests of trackers share: a run that is tracked, interrupted and resumed."""

from rl_policy.recipes.sft import SftMetrics
from rl_policy.run.metrics import MetricsLog
from rl_policy.run.trackers import TrackedRun, open_trackers


def track(directory, name, *, steps, resumed_step=None):
    """Track steps by one tracker; the loss of a step is half its number, later a quarter of it."""
    run = TrackedRun(
        directory=directory,
        project="doubling",
        name="first",
        config={"grpo": {"steps": 3}, "seed": 0},
        resumed_step=resumed_step,
    )
    share = 0.5 if resumed_step is None else 0.25
    path = directory / "metrics.jsonl"
    tracked = open_trackers([name], run)
    with MetricsLog(path, trackers=tracked, resumed_step=resumed_step) as log:
        for step in steps:
            log.write(SftMetrics(step=step, loss=share * step, step_s=1.0))


def track_and_resume(directory, name):
    """Track the steps 0 to 3 with a resume after step 1, from the checkpoint of step 1."""
    track(directory, name, steps=[0, 1, 2])
    track(directory, name, steps=[2, 3], resumed_step=1)
