import pytest
from tracked_runs import track_and_resume

pytestmark = pytest.mark.needs("rl-policy[mlflow]")
mlflow = pytest.importorskip("mlflow", reason="comes with the extra mlflow")


def runs_in(uri):
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("doubling")
    return client, client.search_runs([experiment.experiment_id])


@pytest.mark.parametrize("is_set", [False, True])
def test_a_run_and_its_resume_are_one_run_of_the_store(tmp_path, monkeypatch, is_set):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    own, other = tmp_path / "mlflow.db", tmp_path / "other.db"
    if is_set:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{other}")
    track_and_resume(tmp_path, "mlflow")
    assert (own.exists(), other.exists()) == (not is_set, is_set)
    client, (run,) = runs_in(f"sqlite:///{other if is_set else own}")
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params == {"grpo.steps": "3", "seed": "0"}
    history = client.get_metric_history(run.info.run_id, "train/loss")
    # A step that was measured again is there twice.
    assert [(each.step, each.value) for each in history] == [
        (0, 0.0),
        (1, 0.5),
        (2, 1.0),
        (2, 0.5),
        (3, 0.75),
    ]
    assert run.data.metrics["timing_s/step"] == 1.0
