"""What all trackers have in common; each one is tested in a file of its own, with its package."""

import pytest
from rl_policy.cli import build_app
from rl_policy.config import load_run_config, override_resumed
from rl_policy.recipes.grpo import GrpoMetrics
from rl_policy.run import trackers
from rl_policy.run.metrics import MetricsLog
from rl_policy.run.trackers import (
    FIELD_NAMES,
    KINDS,
    TrackedRun,
    TrackerKind,
    check_trackers,
    open_trackers,
)
from typer.testing import CliRunner


class Memory:
    """A tracker that keeps what it gets."""

    def __init__(self, run=None):
        self.logged, self.num_closed = {}, 0

    def log(self, numbers, *, step):
        self.logged[step] = dict(numbers)

    def close(self):
        self.num_closed += 1


@pytest.fixture
def not_installed(monkeypatch):
    """Let no tracker's package be installed."""
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)


def test_a_tracker_gets_our_columns_and_the_field_s_names_of_them(tmp_path):
    tracker = Memory()
    with MetricsLog(tmp_path / "metrics.jsonl", trackers=[tracker]) as log:
        measured = {"step_s": 2.0, "reward_std": 0.5, "extra": {"weight_version": 3}}
        log.write(GrpoMetrics(step=4, kl=float("nan"), diagnostics={"probs_ratio": 1}, **measured))
    assert tracker.logged == {
        4: {
            "step_s": 2.0,
            "timing_s/step": 2.0,
            "reward_std": 0.5,
            "train/reward_std": 0.5,
            "refit_s": 0.0,
            "timing_s/update_weights": 0.0,
            "weight_version": 3,
            "probs_ratio": 1,
        }
    }
    assert tracker.num_closed == 1


def test_a_run_that_fails_closes_its_trackers(tmp_path):
    tracker = Memory()
    with (
        pytest.raises(RuntimeError, match="a step"),
        MetricsLog(tmp_path / "metrics.jsonl", trackers=[tracker]),
    ):
        raise RuntimeError("a step")
    assert tracker.num_closed == 1


def test_names_of_the_field_are_given_once_and_are_none_of_our_columns():
    assert len(set(FIELD_NAMES.values())) == len(FIELD_NAMES)
    assert not FIELD_NAMES.keys() & set(FIELD_NAMES.values())


@pytest.mark.parametrize("name", KINDS)
def test_a_tracker_without_its_package_is_refused_with_the_remedy(not_installed, name):
    with pytest.raises(ValueError, match=rf"logger=\['{name}'\].* is not installed") as error:
        check_trackers([name])
    assert f'pip install "rl-policy[{KINDS[name].extra}]"' in str(error.value)


def test_the_command_refuses_a_missing_tracker_before_anything_starts(
    not_installed, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(build_app(), ["sft", "logger=[jsonl,wandb]"])
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: logger=['jsonl', 'wandb']: wandb is not installed: leave")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_tracker_and_one_named_twice_are_refused():
    with pytest.raises(ValueError, match=r"logger=\['comet'\]: there is no tracker 'comet', but j"):
        check_trackers(["comet"])
    with pytest.raises(ValueError, match="names 'jsonl' twice"):
        check_trackers(["jsonl", "jsonl"])


@pytest.fixture
def installed_tracker(tmp_path, monkeypatch):
    """Return a function that installs a package whose tracker has a name."""

    def install(name, package="stranger"):
        info = tmp_path / "site" / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            f"[rl_policy.trackers]\n{name} = {package}_tracker:Lines\n"
        )
        (tmp_path / "site" / f"{package}_tracker.py").write_text(
            "class Lines:\n"
            "    def __init__(self, run):\n"
            "        self.file = (run.directory / 'lines').open('a')\n"
            "    def log(self, numbers, *, step):\n"
            "        self.file.write(f'{step} {dict(numbers)}\\n')\n"
            "    def close(self):\n"
            "        self.file.close()\n"
        )
        monkeypatch.syspath_prepend(tmp_path / "site")

    return install


def test_another_package_s_tracker_is_found_by_its_entry_point(installed_tracker, tmp_path):
    installed_tracker("lines")
    check_trackers(["lines", "jsonl"])
    run = TrackedRun(directory=tmp_path, project="p", name="n", config={})
    (tracker,) = open_trackers(["jsonl", "lines"], run)
    tracker.log({"loss": 1.0}, step=3)
    tracker.close()
    assert (tmp_path / "lines").read_text() == "3 {'loss': 1.0}\n"


def test_two_trackers_of_one_name_are_refused(installed_tracker):
    installed_tracker("wandb")
    with pytest.raises(ValueError, match=r"'wandb' is registered more.*own and stranger_tracker:L"):
        check_trackers(["wandb"])
    installed_tracker("lines", "one")
    installed_tracker("lines", "other")
    with pytest.raises(ValueError, match=r"'lines' is registered .* one_tracker:Lines and other_t"):
        check_trackers(["lines"])


def test_metrics_are_written_without_a_tracker_too(not_installed, tmp_path):
    check_trackers([])
    check_trackers(["jsonl"])
    assert (
        open_trackers(["jsonl"], TrackedRun(directory=tmp_path, project="", name="", config={}))
        == []
    )


def test_an_id_is_kept_for_a_resume(tmp_path):
    options = {"directory": tmp_path, "project": "p", "name": "n", "config": {}}
    run = TrackedRun(**options)
    assert run.known_id("wandb") is None
    run.keep_id("wandb", "a")
    run.keep_id("mlflow", "b")
    resumed = TrackedRun(**options, resumed_step=3)
    assert (resumed.known_id("wandb"), resumed.known_id("mlflow")) == ("a", "b")


def test_a_tracker_that_cannot_be_opened_closes_the_others(tmp_path, monkeypatch):
    opened = []

    def good(run):
        opened.append(Memory())
        return opened[-1]

    def bad(run):
        raise OSError("no server")

    kinds = {"good": TrackerKind(good, "json", ""), "bad": TrackerKind(bad, "json", "")}
    monkeypatch.setattr(trackers, "KINDS", kinds)
    run = TrackedRun(directory=tmp_path, project="p", name="n", config={})
    with pytest.raises(OSError, match="no server"):
        open_trackers(["good", "bad"], run)
    assert opened[0].num_closed == 1


def test_trackers_may_change_when_a_run_is_resumed():
    config = load_run_config("sft")
    assert config.logger == ["jsonl"]
    assert override_resumed(config, ["logger=[mlflow]"]).logger == ["mlflow"]
