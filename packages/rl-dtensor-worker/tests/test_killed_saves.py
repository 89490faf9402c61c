"""`kill -9` in the middle of a save: what loads afterwards is the last complete checkpoint."""

import os
import random
import signal
import time

import pytest
import save_until_killed
from patience import PATIENCE_S, wait_until
from rank_pool import rank_context
from rl_interfaces.backend.runtime import ReservedPort
from tiny_model import make_config

# `CHECKPOINT_KILLS=200` kills more often.
NUM_KILLS = int(os.environ.get("CHECKPOINT_KILLS", "10")) // 2
FEW_KILLS = min(4, NUM_KILLS)
CASES = [(False, FEW_KILLS), (True, NUM_KILLS)]
if "CHECKPOINT_KILLS" in os.environ:
    CASES.append((False, NUM_KILLS))


@pytest.fixture(scope="module")
def zygote():
    context = rank_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=save_until_killed.serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    yield ours
    ours.close()
    process.join(timeout=PATIENCE_S)
    if process.is_alive():
        process.kill()


@pytest.fixture
def port():
    with ReservedPort() as reserved:
        yield reserved.number


def lines_of(directory):
    log = directory / "log"
    return log.read_text().splitlines() if log.is_file() else []


def wait_for(directory, text):
    """Return the seconds until rank 0 logged `text`."""
    begin = time.monotonic()
    wait_until(lambda: text in lines_of(directory), what=f"the line {text!r}")
    return time.monotonic() - begin


def versions_of(lines, *words):
    return [int(line.split()[1]) for line in lines if line.split()[0] in words]


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("in_background", "num_kills"), CASES)
def test_the_last_complete_checkpoint_loads(
    zygote, tiny_model, tmp_path, port, in_background, num_kills
):
    config = make_config(
        tiny_model, dtensor_cfg={"enabled": True, "async_checkpoint": in_background}
    )
    moments = random.Random(num_kills)  # a case with more kills repeats none of one with fewer
    version, longest, before = 1, 0.05, []
    for kill in range(num_kills + 1):
        is_last = kill == num_kills
        arguments = {
            "config": config,
            "directory": str(tmp_path),
            "port": port,
            "first_version": version,
            "last_version": version if is_last else version + 1000,
        }
        zygote.send(arguments)
        ranks = zygote.recv()
        if not is_last:
            # The second save of a process: the first one made the room and is measured.
            longest = max(longest, min(1.0, time_of_a_save(tmp_path, version)))
            if kill == 0:
                # Until here nothing may be on the disk: a save goes on in the background.
                wait_for(tmp_path, f"saving {version + 2}")
            time.sleep(moments.uniform(0, 1.5 * longest))
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
        codes = zygote.recv()
        assert codes == ([0, 0] if is_last else [-signal.SIGKILL] * 2)
        lines = lines_of(tmp_path)
        if kill > 0:
            check_loaded(lines, before, in_background=in_background)
        before = lines
        version = versions_of(lines, "saving")[-1] + 1


def time_of_a_save(directory, version):
    wait_for(directory, f"saving {version}")
    return wait_for(directory, f"saving {version + 1}")


def check_loaded(lines, before, *, in_background):
    """Check the version that was loaded against what the killed ranks had logged."""
    (version,) = versions_of(lines[len(before) :], "loaded")
    # In the background, a save is on the disk for sure when the one after it has been copied.
    complete = versions_of(before, "loaded", "saved")[-2 if in_background else -1 :][0]
    assert complete <= version <= versions_of(before, "saving")[-1]
