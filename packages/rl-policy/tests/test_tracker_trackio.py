import json
import os
import subprocess
import sys

import pytest
from patience import PATIENCE_S

pytestmark = pytest.mark.needs("rl-policy[trackio]")
pytest.importorskip("trackio", reason="comes with the extra trackio")

# Trackio reads its directory when it is imported: a process of its own.
CODE = """
import json, sys
from pathlib import Path
from tracked_runs import track_and_resume
track_and_resume(Path(sys.argv[1]), "trackio")
import trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs("doubling")
rows = SQLiteStorage.get_logs("doubling", run.name)
print(json.dumps([run.name, [(each["step"], each["train/loss"]) for each in rows]]))
"""


def test_a_run_and_its_resume_are_one_run_of_the_project(tmp_path):
    beside = os.path.dirname(__file__)
    inherited = [entry for entry in [os.environ.get("PYTHONPATH")] if entry]
    environment = {
        **os.environ,
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "PYTHONPATH": os.pathsep.join([beside, *inherited]),
    }
    result = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=PATIENCE_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()  # what it says of itself is not on standard output
    name, rows = json.loads(line)
    assert name == "first"
    assert sorted(map(tuple, rows)) == [(0, 0.0), (1, 0.5), (2, 0.5), (2, 1.0), (3, 0.75)]
