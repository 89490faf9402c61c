"""The loop of a run over a trainer and a policy that compute nothing."""

import errno
import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console
from rl_policy.config import load_run_config
from rl_policy.recipes.sft import SftMetrics
from rl_policy.run.directory import RunDirectory, RunState
from rl_policy.run.metrics import RunDisplay
from rl_policy.run.session import Session, run_loop

STEPS, EVERY = 6, 2


class Trainer:
    """Notes which checkpoints it finds when it takes a step."""

    is_done, data_position, weight_version = False, 0, -1

    def measure_start(self):
        return SftMetrics(step=0)

    def __init__(self, directory):
        self.directory = directory
        self.found = {}

    def take_step(self, step, *, is_measured, needs_score):
        checkpoints = self.directory / "checkpoints"
        self.found[step] = saved(self.directory) if checkpoints.exists() else []
        return SftMetrics(step=step, loss=1.0)


class Policy:
    """Saves nothing but a file; the second save finds a disk that is full after it."""

    has_adapters = False

    def __init__(self, error):
        self.error = error
        self.num_saves = 0

    def save_checkpoint(self, weights, optimizer, tokenizer):
        weights.mkdir()
        (weights / "weights").touch()
        self.num_saves += 1
        if self.num_saves == 2:
            raise self.error

    def save_hf_checkpoint(self, path):
        path.mkdir()

    def keep_random_state(self):
        return True


@pytest.fixture
def run(tmp_path):
    """Return a function that runs the loop; it returns the trainer, and what was shown."""

    def run(error, *settings, **more):
        config = load_run_config("sft", overrides=[f"checkpoint.every={EVERY}", *settings])
        shown = io.StringIO()
        session = Session(
            inputs=SimpleNamespace(
                config=config, tokenizer=SimpleNamespace(save_pretrained=lambda path: None)
            ),
            directory=RunDirectory(tmp_path),
            cluster=None,
            display=RunDisplay(Console(file=shown)),
        )
        options = {"name": "SFT", "num_steps": STEPS, "eval_every": 3, "start": RunState()}
        options |= more
        trainer = Trainer(tmp_path)
        run_loop(session, trainer, Policy(error), **options)
        return trainer, shown.getvalue()

    return run


def saved(path):
    return sorted(each.name for each in (path / "checkpoints").glob("step_*"))


def steps_of(path):
    return [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()]


# As a rank's own failure, and as what the others are told of it.
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("not written: rank 1 failed: OSError: [Errno 28] No space left on device"),
    ],
)
def test_a_checkpoint_without_room_is_left_out_if_asked(run, tmp_path, error):
    trainer, shown = run(error, "checkpoint.skip_when_full=true", "checkpoint.keep_last=9")
    assert trainer.found[5] == ["step_2"]  # without the part that was written
    assert saved(tmp_path) == ["step_2", "step_6"]
    assert "no checkpoint of step 4: " in shown
    assert "No space left on device" in shown
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("error", "settings"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), []),
        (OSError(errno.EIO, "Input/output error"), ["checkpoint.skip_when_full=true"]),
    ],
)
def test_any_other_checkpoint_ends_the_run(run, tmp_path, error, settings):
    with pytest.raises(OSError, match=error.strerror):
        run(error, *settings)
    assert saved(tmp_path) == ["step_2", "step_4.partial"]
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4]


def test_a_run_may_begin_without_a_measurement(run, tmp_path):
    error = OSError(errno.ENOSPC, "No space left on device")
    trainer, _ = run(error, "checkpoint.skip_when_full=true", eval_at_start=False)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert list(trainer.found) == [1, 2, 3, 4, 5, 6]
