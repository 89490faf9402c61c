import json
import struct
import time

import pytest
from tracked_runs import track

pytestmark = pytest.mark.needs("rl-policy[wandb]")
wandb = pytest.importorskip("wandb", reason="comes with the extra wandb")
from wandb.proto import wandb_internal_pb2  # noqa: E402

BLOCK, HEADER = 2**15, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path):
    """Return the records of an offline run, which are in LevelDB's format of logs."""
    data, found, parts = path.read_bytes(), [], b""
    assert data[:4] == b":W&B"
    at = HEADER
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # a header is never split: the rest of a block is zeros
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (FULL, LAST):
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
        else:
            assert kind in (FIRST, MIDDLE)
    return found


def history(found):
    """Return the numbers of each step."""
    rows = []
    for record in found:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {item.key or "/".join(item.nested_key): item.value_json for item in items}
            rows.append({name: json.loads(value) for name, value in row.items()})
    return rows


def test_a_run_and_its_resume_are_one_run_of_the_project(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    track(tmp_path, "wandb", steps=[0, 1, 2])
    time.sleep(1.1)  # its directory has the second of the start in its name
    track(tmp_path, "wandb", steps=[2, 3], resumed_step=1)
    wandb.teardown()  # `finish` only tells the service to close the file; its end has closed it
    found = [records(path) for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))]
    assert len(found) == 2
    runs = [
        record.run for each in found for record in each if record.WhichOneof("record_type") == "run"
    ]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {
        (runs[0].run_id, "doubling", "first")
    }
    rows = [row for each in found for row in history(each)]
    assert [(row["_step"], row["train/loss"]) for row in rows] == [
        (0, 0.0),
        (1, 0.5),
        (2, 1.0),
        (2, 0.5),
        (3, 0.75),
    ]
    assert {row["timing_s/step"] for row in rows} == {1.0}
