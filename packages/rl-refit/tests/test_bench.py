"""The command that measures a refit, as a user runs it, with few bytes."""

import os
import re
import stat
import subprocess
import sys

import pytest
from patience import PATIENCE_S, wait_until
from rl_refit.bench.__main__ import main
from rl_refit.bench.picture import timeline
from rl_refit.report import RefitReport, Span

pytestmark = pytest.mark.needs("rl-refit[plot]")

SMALL = ["--mib", "20", "--rounds", "1", "--timeout-s", str(PATIENCE_S)]


def row_of(printed, name):
    """Return the seconds of a line of the table of phases, by phase."""
    (head,) = re.findall(r"^seconds +(.*)$", printed, re.MULTILINE)
    (row,) = re.findall(rf"^{name}  +([\d. ]+)$", printed, re.MULTILINE)
    return dict(zip(head.split(), map(float, row.split()), strict=True))


def test_both_ends_here(tmp_path, capsys):
    picture = tmp_path / "refit.png"
    assert main([*SMALL, "--receivers", "2", "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "32 MiB in 9 tensors of bfloat16, shm, receivers=2, verify=digest" in printed
    assert "bytes to each receiver          1.0000 of all" in printed
    for name in ("receiver 0", "receiver 1"):
        assert row_of(printed, name)["load"] > 0
        assert re.search(rf"^{name} +verify +\|.*█.*\|$", printed, re.MULTILINE)
    assert row_of(printed, "sender")["pack"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_patches_are_few_bytes(capsys):
    assert main([*SMALL, "--transport", "collective", "--changed", "0.01"]) == 0
    (share,) = re.findall(r"bytes to each receiver +([\d.]+) of all", capsys.readouterr().out)
    assert 0.01 < float(share) < 0.03


def test_ends_apart(tmp_path):
    file = tmp_path / "address.json"
    command = [sys.executable, "-m", "rl_refit.bench"]
    sender = subprocess.Popen(
        [*command, "send", str(file), *SMALL], stdout=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: file.exists() and file.stat().st_size, what="the sender's address")
        assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
        received = subprocess.run(
            [*command, "receive", str(file)], stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S
        )
        printed, _ = sender.communicate(timeout=PATIENCE_S)
    finally:
        sender.kill()
    assert (sender.returncode, received.returncode) == (0, 0)
    assert "chain, receivers=1" in printed
    assert row_of(printed, "sender")["wire"] > 0
    assert row_of(received.stdout, "receiver 0")["load"] > 0
    assert not file.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rounds", "0"], "--rounds=0 is not positive"),
        (["--changed", "2"], "--changed=2.0 is not between 0 and 1"),
        (["--mib", "1", "--transport", "pigeons"], "transport='pigeons' is not among"),
        (["receive", "nowhere"], "FILE=nowhere does not exist"),
        (["receive", __file__], "was not written by `send`"),
        (["send", __file__], "exists: the address goes into a new file"),
        (["--mib", "1", "--changed", "0.1", "--verify", "none"], "verify"),
    ],
)
def test_what_is_not_possible_is_said_in_a_line(arguments, words, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


def test_an_option_before_the_command_is_not_forgotten(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--mib", "1", "send", str(tmp_path / "address.json")])
    assert ended.value.code == 2
    assert "unrecognized arguments: send" in capsys.readouterr().err


def test_a_sender_that_nobody_comes_to_says_so_in_a_line(tmp_path, capsys):
    file = tmp_path / "address.json"
    assert main(["send", str(file), "--mib", "1", "--timeout-s", "0.5"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not file.exists()


def test_a_timeline_shows_when_phases_ran():
    spans = (Span("pack", 10.0, 11.0), Span("wire", 11.0, 14.0))
    late = (Span("join", 5.0, 12.0), Span("load", 12.0, 14.0))
    ends = {
        name: RefitReport(version=1, seconds=4.0, bytes=1, spans=each)
        for name, each in {"sender": spans, "receiver": late}.items()
    }
    rows = [line.split("|")[1] for line in timeline(ends)]
    # From the sender's beginning on; a column is a 72nd of 4 s.
    assert [(row.find("█"), row.rfind("█")) for row in rows[:4]] == [
        (0, 18),
        (18, 71),
        (0, 36),
        (36, 71),
    ]
    assert rows[4].split() == ["0", "4.0000", "s"]
