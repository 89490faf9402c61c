"""The run of `docs/pages/real-model.md` with the model from its package:
`nox -s field-model -- --learn`.

It takes about 15 minutes on two cores, so that pytest finds it by its name alone.
"""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import real_model
from rl_policy.run.metrics import read_metrics

PAGE = Path(__file__).parents[3] / "docs" / "pages" / "real-model.md"


def block(language):
    return re.search(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL).group(1)


@pytest.mark.timeout(3600)
def test_the_run_of_the_page_learns(tmp_path):
    model = real_model.write(tmp_path / "smollm2")
    subprocess.run(["python", "-c", block("python")], cwd=tmp_path, check=True)
    words = [
        f"policy.model_name={model}" if word == f"policy.model_name={real_model.NAME}" else word
        for word in shlex.split(block("bash"))
    ]
    assert f"policy.model_name={model}" in words
    subprocess.run(words, cwd=tmp_path, check=True)
    rows = [*read_metrics(tmp_path / "runs/sums/metrics.jsonl")]
    print("\n".join(f"{row['step']}: {row['reward_mean']} {row['accuracy']}" for row in rows))
    sampled = [row["reward_mean"] for row in rows if row["step"]]
    assert sum(sampled[-5:]) / 5 > sum(sampled[:5]) / 5 + 0.1
    assert rows[-1]["accuracy"] > rows[0]["accuracy"]
