"""Directories that do not outlive their owner."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import PATIENCE_S
from rl_refit.private_directory import PrivateDirectory, remove_abandoned, remove_if_abandoned

OWNER = """
import sys, time
from rl_refit.private_directory import PrivateDirectory

directory = PrivateDirectory(sys.argv[1])
(directory.path / "kept").write_text("something")
print(directory.path, flush=True)
time.sleep(3600)
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
    owner.wait(timeout=PATIENCE_S)
    owner.stdout.close()
    assert os.path.exists(left)
    with PrivateDirectory(prefix):
        assert not os.path.exists(left)
        assert other.is_dir()


def test_a_path_that_would_be_too_long_is_avoided(prefix, tmp_path):
    with PrivateDirectory(prefix, most_characters=len(str(tmp_path))) as directory:
        assert str(directory.path.parent) == "/tmp"


def look_at(path, *, age_s):
    """Let the next one to look find a directory of that age."""
    then = time.time() - age_s
    os.utime(path, (then, then))
    remove_if_abandoned(path)


@pytest.mark.parametrize("left", [[], ["lock-early"]])
def test_a_killed_start_is_removed_when_it_is_old(tmp_path, left):
    path = tmp_path / "rl-refit-test-1"
    path.mkdir()
    for name in left:
        (path / name).touch()
    look_at(path, age_s=60)
    assert sorted(os.listdir(path)) == left
    look_at(path, age_s=3600)
    assert not path.exists()


def test_what_somebody_keeps_without_a_lock_is_left_alone(tmp_path, monkeypatch):
    kept = tmp_path / "rl-refit-test-results"
    kept.mkdir()
    (kept / "table").touch()
    look_at(kept, age_s=3600)
    assert (kept / "table").exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    link = tmp_path / "rl-refit-test-link"
    link.symlink_to(empty)
    look_at(link, age_s=3600)
    assert link.is_symlink()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    look_at(empty, age_s=3600)
    assert empty.is_dir()


def test_a_link_to_a_directory_that_is_free_is_not_followed(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "lock").touch()
    link = tmp_path / "rl-refit-test-link"
    link.symlink_to(target)
    remove_if_abandoned(link)
    assert (target / "lock").exists()


def test_the_lock_goes_last(prefix, monkeypatch):
    gone = []

    def noting(original):
        def remove(path, **options):
            gone.append(Path(path).name)
            original(path, **options)

        return remove

    with PrivateDirectory(prefix) as directory:
        for number in range(8):
            (directory.path / str(number)).touch()
        (directory.path / "a directory").mkdir()
        (directory.path / "a directory" / "file").touch()
        monkeypatch.setattr(Path, "unlink", noting(Path.unlink))
        monkeypatch.setattr("shutil.rmtree", noting(shutil.rmtree))
    assert gone[-1] == "lock"
    assert len(gone) == 10
    assert not directory.path.exists()


def test_a_removal_that_was_cut_short_is_taken_up_again(prefix, monkeypatch):
    directory = PrivateDirectory(prefix)
    (directory.path / "kept").touch()

    unlink = Path.unlink

    def killed(path, **options):
        if path.name == "kept":
            raise KeyboardInterrupt
        unlink(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            directory.close()
    os.close(directory._lock)  # what the death of its process does
    remove_abandoned(prefix)
    assert not directory.path.exists()


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", ["os.open", "fcntl.flock"])
def test_a_start_that_fails_leaves_nothing(prefix, tmp_path, monkeypatch, error, call):
    def fail(*arguments, **options):
        raise error

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        with pytest.raises(type(error)):
            PrivateDirectory(prefix)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == len(before)
