"""The commands that are not run as they are written: why, and how they are checked instead."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from code_blocks import ROOT
from packaging.requirements import Requirement
from rl_policy.backends import BackendNotInstalledError
from rl_policy.cli import build_app
from rl_policy.commands.serve import load_serve_config
from rl_policy.tinker.command import load_server_config
from typer.testing import CliRunner

# Stand-ins for what a page lets its reader choose.
PLACEHOLDERS = {"DIR": "runs/first/final", "MODEL_DIR": "runs/first/final", "RUN_DIR": "started"}


def check_run(command: str) -> None:
    """Load and validate the configuration of a run, without starting it."""
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(command)]
    words = [re.sub(r"=DIR$", f"={PLACEHOLDERS['DIR']}", word) for word in words]
    # A run's directory is there on these pages, as its reader has it by then.
    words = ["a-new-run" if before == "--out" else word for before, word in pairwise(["", *words])]
    arguments = words[words.index("rl-policy") + 1 :]
    result = CliRunner().invoke(build_app(), [*arguments, "--show-config"])
    assert result.exit_code == 0, f"{command}: {result.output}"


def check_merge(command: str) -> None:
    """Parse the arguments, up to the checkpoint that the started run has not, or to adapters."""
    words = [word.replace("RUN_DIR", PLACEHOLDERS["RUN_DIR"]) for word in shlex.split(command)]
    words = [
        "a-new-model" if before == "--out" else word for before, word in pairwise(["", *words])
    ]
    result = CliRunner().invoke(build_app(), words[1:])
    assert result.exit_code == 2, f"{command}: {result.output}"
    assert re.search("has no checkpoint|holds no run", result.output), result.output


def check_doctor(command: str) -> None:
    """Look at the versions alone: a machine may lack the rest."""
    result = CliRunner().invoke(build_app(), [*shlex.split(command)[1:], "versions"])
    assert result.exit_code == 0, f"{command}: {result.output}"


def check_plan(command: str) -> None:
    """Plan with a unit that is none, which ends the command after its options have been read."""
    words = shlex.split(command)[1:]
    words[words.index("--memory") + 1] = "80"
    result = CliRunner().invoke(build_app(), words)
    assert result.exit_code == 2, f"{command}: {result.output}"
    assert "with a unit" in result.stderr, f"{command}: {result.stderr}"


def check_serve(command: str) -> None:
    """Check the configuration of a server, without starting it."""
    words = shlex.split(command)[2:]
    if words:
        overrides = [word for word in words[1:] if "=" in word]
        load_server_config(PLACEHOLDERS.get(words[0], words[0]), overrides=overrides)
    names = [word for word in words if word.startswith("--")]
    wide = {"COLUMNS": "200"}
    shown = CliRunner().invoke(build_app(), ["serve-tinker", "--help"], env=wide).output
    assert all(name in shown for name in names), command


def check_client(command: str) -> None:
    """Look for what the page's program takes from the client; the server's tests make its calls."""
    import tinker

    names = ("Datum", "ModelInput", "AdamParams", "SamplingParams")
    assert all(hasattr(tinker.types, name) for name in names), command


def check_serve_agents(command: str) -> None:
    """Check the configuration of a server and the flags, without starting it."""
    words = shlex.split(command)[2:]
    overrides = [word for word in words[1:] if "=" in word]
    shown = CliRunner().invoke(build_app(), ["serve", "--help"], env={"COLUMNS": "200"}).output
    assert all(word in shown for word in words if word.startswith("--")), command
    if not words:
        return
    try:
        load_serve_config(words[0], overrides=overrides)
    except BackendNotInstalledError:
        # The last thing that is looked at.
        assert find_spec("vllm") is None, command


def check_agent(command: str) -> None:
    """Find what the page's program imports; the server's tests do what it does."""
    from rl_policy.data.batches import completion_batch
    from rl_policy.generation.answers import read_answers

    assert callable(read_answers), command
    assert callable(completion_batch), command


def check_verb(command: str) -> None:
    """Find the command, which refuses a directory that holds no run."""
    words = shlex.split(command)
    result = CliRunner().invoke(build_app(), words[words.index("rl-policy") + 1 :])
    assert result.exit_code == 2, f"{command}: {result.output}"
    assert "holds no run" in result.stderr, f"{command}: {result.stderr}"


def check_program(command: str) -> None:
    """Find what the page's program imports of these packages; it compiles."""
    (name,) = re.findall(r"\S+\.py", command)
    found = 0
    for node in ast.walk(ast.parse(Path(name).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rl_"):
            module = import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name), f"{name}: no {alias.name} in {node.module}"
                found += 1
    assert found, f"{name} imports none of the packages"


def check_compiles(command: str) -> None:
    """Compile the page's program."""
    (name,) = re.findall(r"\S+\.py", command)
    ast.parse(Path(name).read_text())


def check_nox(command: str) -> None:
    """Find the nox sessions that are named."""
    named = re.findall(r'-s (?:"([^"]+)"|(\S+))', command)
    for quoted, plain in named:
        session, _, parameter = (quoted or plain).partition("(")
        assert session in nox_sessions(), f"{command}: there is no session {session}"
        if parameter:
            assert (ROOT / "packages" / parameter.rstrip(")")).is_dir(), command


def check_install(command: str) -> None:
    """Find the packages that are named, and their extras."""
    packages = ROOT / "packages"
    words = [word for word in shlex.split(command) if not word.startswith("-")]
    named = words[words.index("install") + 1 :]
    is_built_here = named[:1] == ["dist"]
    named = named[is_built_here:]
    assert named, command
    for word in named:
        if word.startswith("./"):
            path, _, extras = word.partition("[")
            project = project_of(ROOT / path)
            wanted = {extra for extra in extras.rstrip("]").split(",") if extra}
        else:
            requirement = Requirement(word)
            if not (packages / requirement.name).is_dir():
                assert not is_built_here, f"{command}: there is no wheel of {requirement.name}"
                continue
            project = project_of(packages / requirement.name)
            wanted = requirement.extras
        assert wanted <= set(project.get("optional-dependencies", {})), command


def check_paths(command: str) -> None:
    """Find the packages, and the files of packages, that are named."""
    for name in re.findall(r"--package (\S+)", command):
        project_of(ROOT / "packages" / name)
    for path in re.findall(r"(?<![\w*/])packages/[\w./-]+", command):
        assert (ROOT / path).exists(), f"{command}: there is no {path}"


def project_of(folder: Path) -> dict[str, Any]:
    """Return the table `project` of a folder's `pyproject.toml`."""
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


@cache
def nox_sessions() -> set[str]:
    """Return the names of all nox sessions, without their parameters."""
    command = [sys.executable, "-m", "nox", "--list"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = set(re.findall(r"^[*-] ([\w-]+)", listed, flags=re.MULTILINE))
    assert names
    return names


@dataclass(frozen=True, slots=True)
class Rule:
    """Commands that are checked otherwise.

    Attributes:
        pattern: What such a command begins with.
        reason: Why it is not run.
        check: Raises unless the command could be run.
    """

    pattern: str
    reason: str
    check: Callable[[str], None]


RULES = [
    Rule(
        r"(uv run )?rl-policy (grpo|ppo|sft|distill|dpo|rm)\b"
        r"(?!.*(--show-config|--out quick|--resume quick))",
        "a run takes minutes, or a GPU",
        check_run,
    ),
    Rule(r"rl-policy eval MODEL_DIR", "the model is the reader's", check_run),
    Rule(r"rl-policy merge RUN_DIR", "the run is the reader's", check_merge),
    Rule(
        r"rl-policy convert-config theirs.yaml --out run.yaml",
        "the file is the reader's",
        check_paths,
    ),
    Rule(r"rl-policy plan meta-llama/", "the model is not on this machine", check_plan),
    Rule(r"rl-policy serve\b(?!-)", "runs until it is ended", check_serve_agents),
    Rule(r"python agent.py", "needs the server", check_agent),
    Rule(r"rl-policy serve-tinker", "runs until it is ended", check_serve),
    Rule(r"python learn.py", "needs the server", check_client),
    Rule(r"python gsm8k.py", "downloads a data set", check_compiles),
    Rule(r"torchrun .* trainers/zero3.py", "needs DeepSpeed", check_program),
    Rule(r"python trainers/own_backend.py", "needs vLLM, and CUDA", check_program),
    Rule(r"rl-policy doctor", "this machine may lack something", check_doctor),
    Rule(
        r"(uv run )?rl-policy (report|compare|watch) (?!quick)",
        "needs a run that took minutes",
        check_verb,
    ),
    Rule(r"(python -m pip install uv && )?uv run rl-policy", "as above", check_run),
    Rule(r"uv run nox\b|nox\b", "a session takes minutes", check_nox),
    Rule(r"(uv )?pip install\b", "would change the environment of the tests", check_install),
    Rule(r"python -m pip install uv$", "would change the environment of the tests", check_install),
    Rule(r"(uv )?sync\b|uv sync\b", "makes the environment of a checkout", check_paths),
    Rule(r"uv (version|build)\b", "makes a release", check_paths),
    Rule(r"uv run (pytest|ruff|pyright)\b", "is a nox session's work", check_paths),
    Rule(r"PYTHONPATH=\S+.* pytest -m gpu", "needs a GPU", check_paths),
    Rule(r"git (clone|tag|push|switch|commit)\b", "changes a repository", check_paths),
]
"""The one list of what is not run as written; everything else is."""


def rule_for(command: str) -> Rule | None:
    """Return the rule that a command falls under; None where it is run."""
    return next((rule for rule in RULES if re.match(rule.pattern, command)), None)
