"""A save counts whole or not at all, wherever it is cut off."""

import os
import sys
from pathlib import Path

import pytest
from rl_interfaces.backend.checkpoint import directories
from rl_interfaces.backend.checkpoint.directories import MARKER, check_complete, partial_of

pytestmark = [pytest.mark.promise, pytest.mark.needs("rl-interfaces[backend]")]

NAMES = ("weights", "optimizer")


def write_and_commit(targets, version):
    directories.begin(targets)
    for target in targets:
        (partial_of(target) / "data").write_text(version)
    directories.commit(targets)


def versions(targets):
    """Return what a load finds in each directory, and check that all are of one save."""
    directories.finish(targets[0])
    assert len({check_complete(target, what="path") for target in targets}) == 1
    return {(target / "data").read_text() for target in targets}


def run_and_exit_at(operation, function):
    """Run `function` in a process that ends at its n-th change of files; return whether it did."""
    child = os.fork()
    if child == 0:
        count = 0

        def exit_at(event, arguments):
            nonlocal count
            written = event == "open" and arguments[1] is not None and "w" in str(arguments[1])
            if written or event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir"):
                count += 1
                if count == operation:
                    os._exit(17)

        sys.addaudithook(exit_at)
        try:
            function()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 17)
    return status == 17


def test_a_save_that_is_cut_off_anywhere_is_the_old_or_the_new_one(tmp_path):
    targets = [tmp_path / name for name in NAMES]
    write_and_commit(targets, "0")
    found = []
    for operation in range(1, 200):
        was_cut_off = run_and_exit_at(operation, lambda: write_and_commit(targets, "new"))
        if operation % 2:  # a load finishes what was cut off, or the next save does
            found.append(versions(targets))
        write_and_commit(targets, "0")
        assert versions(targets) == {"0"}
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(NAMES)
        if not was_cut_off:
            break
    assert not was_cut_off
    assert operation > 15
    assert {"0"} in found
    assert found.count({"new"}) > 2
    assert all(each in ({"0"}, {"new"}) for each in found)


def test_what_no_save_has_written_is_not_replaced(tmp_path):
    target = tmp_path / "mine"
    target.mkdir()
    (target / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="no save has written it"):
        directories.begin([tmp_path / "weights", target])
    with pytest.raises(ValueError, match="are nested"):
        directories.begin([tmp_path / "all", tmp_path / "all" / "optimizer"])
    with pytest.raises(ValueError, match="are nested"):
        directories.begin([tmp_path / "all", Path(tmp_path / "all")])
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / MARKER).unlink(), f"has no {MARKER}"),
        (lambda path: (path / "data").unlink(), "data is missing"),
        (lambda path: (path / "data").write_text(""), "data has 0 bytes"),
    ],
)
def test_an_incomplete_copy_is_named(tmp_path, damage, words):
    targets = [tmp_path / name for name in NAMES]
    write_and_commit(targets, "0")
    damage(targets[1])
    with pytest.raises(ValueError, match=words):
        check_complete(targets[1], what="optimizer_path")
