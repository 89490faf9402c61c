import struct

import pytest
from rl_policy.run.metrics import plot_reward

pytestmark = pytest.mark.needs("rl-policy[plot]")
pytest.importorskip("matplotlib", reason="comes with the extra plot")


@pytest.mark.parametrize("num_steps", [0, 1, 60])
def test_a_picture_of_any_number_of_steps(tmp_path, num_steps):
    rows = [{"step": 0, "reward_mean": None, "accuracy": 0.4}] + [
        {"step": step, "reward_mean": step / 60, "accuracy": 0.5 if step % 5 == 0 else None}
        for step in range(1, num_steps + 1)
    ]
    path = tmp_path / "reward.png"
    plot_reward(rows, path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert (width, height) == (1200, 675)
