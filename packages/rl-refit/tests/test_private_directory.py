"""Directories that do not outlive their owner."""

import os
import signal
import subprocess
import sys

import pytest
from rl_refit.private_directory import PrivateDirectory, remove_abandoned

OWNER = """
import sys, time
from rl_refit.private_directory import PrivateDirectory

directory = PrivateDirectory(sys.argv[1])
(directory.path / "kept").write_text("something")
print(directory.path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def prefix(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return "rl-refit-test-"


def test_it_is_the_owners_alone_and_goes_with_it(prefix, tmp_path):
    with PrivateDirectory(prefix) as directory:
        assert directory.path.parent == tmp_path
        assert directory.path.stat().st_mode & 0o777 == 0o700
        (directory.path / "kept").write_text("something")
        remove_abandoned(prefix)
        assert (directory.path / "kept").read_text() == "something"
    assert not directory.path.exists()
    directory.close()


def test_a_forked_process_leaves_it_to_its_owner(prefix):
    with PrivateDirectory(prefix) as directory:
        child = os.fork()
        if child == 0:
            directory.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert directory.path.is_dir()


def test_what_a_killed_owner_leaves_is_removed_by_the_next(prefix, tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, prefix],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    left = owner.stdout.readline().strip()
    other = tmp_path / f"{prefix}of somebody else"
    other.mkdir()
    owner.send_signal(signal.SIGKILL)
    owner.wait(timeout=30)
    owner.stdout.close()
    assert os.path.exists(left)
    with PrivateDirectory(prefix):
        assert not os.path.exists(left)
        assert other.is_dir()


def test_a_path_that_would_be_too_long_is_avoided(prefix, tmp_path):
    with PrivateDirectory(prefix, most_characters=len(str(tmp_path))) as directory:
        assert str(directory.path.parent) == "/tmp"
