"""The example of the README, as a user runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tiny_models import build_tiny

README = Path(__file__).parents[1] / "README.md"


def test_the_example_lowers_the_loss(tmp_path):
    model = build_tiny(tmp_path / "model", "qwen2")
    (example,) = re.findall(
        r"^```python\n(.*?)^```$", README.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    script = tmp_path / "train.py"
    script.write_text(example)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(script), model]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0]
