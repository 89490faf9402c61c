"""`rl-policy doctor`: on this machine, and on one that was broken in a known way."""

import os
import resource
import socket
import subprocess
import sys

import pytest
from patience import PATIENCE_S
from recipe_runs import MODULE
from rl_policy.commands.doctor import PARTS, Finding, findings

pytestmark = pytest.mark.needs("rl-policy[dtensor]")


def look(*parts, limit=None, **environment):
    """Return status and output of the command, with a limit of open files."""

    def lower():
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    result = subprocess.run(
        [*MODULE, "doctor", *parts],
        env={**os.environ, **environment},
        preexec_fn=lower,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert "Traceback" not in result.stderr
    return result.returncode, result.stdout + result.stderr


def test_what_is_there_is_ok():
    status, output = look("versions", "ranks")
    assert status == 0, output
    assert f"ok    python: {sys.version.split()[0]}" in output
    assert "ok    rl-policy: 0." in output
    assert "ok    ranks: two processes add up a tensor by" in output


@pytest.mark.slow
def test_ray_runs_a_task_or_is_named(monkeypatch):
    (found,) = findings(["ray"])
    assert found.is_ok
    assert found.text.startswith("1 nodes, ")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        status, output = look("ray", RAY_ADDRESS=address)
    assert status == 1
    assert f"FAIL  ray: RAY_ADDRESS={address} cannot be reached" in output
    assert "-> start that Ray, or set RAY_ADDRESS=local" in output


@pytest.mark.slow
def test_a_package_that_cannot_be_imported_or_crashes_is_a_line(tmp_path):
    for name, line in [
        ("vllm", "raise ImportError('no libcudart')"),
        ("peft", "import os, signal"),
    ]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(line + "\n")
    (tmp_path / "peft/__init__.py").write_text("import os\nos.kill(os.getpid(), 11)\n")
    status, output = look("packages", PYTHONPATH=str(tmp_path))
    assert status == 1
    assert "FAIL  vllm: cannot be imported: ImportError: no libcudart" in output
    assert '-> for inference engines: pip install "rl-policy[vllm]"' in output
    assert "FAIL  peft: cannot be imported: its status is -11" in output
    assert "ok    rl_dtensor_worker: can be imported" in output


def test_few_open_files_and_a_full_disk_are_named(tmp_path, monkeypatch):
    status, output = look("limits", limit=300)
    assert status == 1
    assert "FAIL  open files: 300 at most\n      -> ulimit -n 65536" in output
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage())
    found = {each.name: each for each in findings(["limits"])}
    assert not found["runs"].is_ok
    assert "free some" in found["runs"].remedy


class Usage:
    free = 2**20


def test_a_requirement_that_is_not_met_is_named(monkeypatch):
    import rl_policy.commands.doctor as module

    monkeypatch.setattr(module, "version", lambda name: "0.1.0")
    found = {each.name: each for each in findings(["versions"])}
    assert "rl-interfaces 0.1.0 is not <0.3,>=0.2" in found["rl-policy"].text
    assert not found["rl-policy"].is_ok


def test_an_unknown_part_is_refused():
    status, output = look("everything")
    assert (status, output.count("\n")) == (2, 1)
    assert f"'everything' is no part: there are {', '.join(PARTS)}" in output


def test_a_line_says_what_to_do():
    assert str(Finding(name="a", text="b")) == "ok    a: b"
    assert str(Finding(name="a", text="b", remedy="c")) == "FAIL  a: b\n      -> c"
    lacking = Finding(name="a", text="b", remedy="c", is_optional=True)
    assert lacking.is_ok
    assert str(lacking) == "      a: b\n      -> c"
