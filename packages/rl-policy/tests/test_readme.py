"""The example of the repository's README, as a user runs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from rl_policy.config import TinyModelSection
from rl_policy.recipes.tiny_model import build_tiny_model, tiny_model_config
from transformers import AutoModelForCausalLM

README = Path(__file__).parents[3] / "README.md"
if not (README.parent / "noxfile.py").exists():
    pytest.skip("needs the repository, not one package of it", allow_module_level=True)


def test_the_example_runs_and_leaves_a_model(tmp_path):
    (example,) = re.findall(
        r"^```python\n(.*?)^```$", README.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    config = tiny_model_config(TinyModelSection(), max_sequence_length=32)
    build_tiny_model(tmp_path / "model", config=config, seed=0)
    done = subprocess.run(
        [sys.executable, "-c", example, "model"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for line in ("loss tensor([", "moved by tensor([[0.0000,", "sampled ['1+2=3"):
        assert line in done.stdout
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert trained.config.hidden_size == config.hidden_size
