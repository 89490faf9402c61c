import pytest
from tracked_runs import track_and_resume

pytestmark = pytest.mark.needs("rl-policy[tensorboard]")
pytest.importorskip("tensorboard", reason="comes with the extra tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402


def test_events_of_a_run_that_was_resumed(tmp_path):
    track_and_resume(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for name in ("loss", "train/loss"):
        found = {event.step: event.value for event in events.Scalars(name)}
        assert found == {0: 0.0, 1: 0.5, 2: 0.5, 3: 0.75}
    assert [event.value for event in events.Scalars("timing_s/step")] == [1.0] * 4
