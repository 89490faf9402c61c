"""Short runs of the recipe `ppo`, through the command line."""

from rl_policy.cli import build_app
from typer.testing import CliRunner

SETTINGS = [
    "ppo.warm_up=false",
    "ppo.prompts_per_step=16",
    "ppo.epochs_per_step=2",
    "ppo.eval_every=2",
    "ppo.value_policy.optimizer.kwargs.lr=3e-3",
    "checkpoint.every=2",
]


def run(*arguments):
    result = CliRunner().invoke(build_app(), ["ppo", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
