"""Every code block of the READMEs, CONTRIBUTING.md and the site is run, or checked by a rule."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from code_blocks import PAGES, ROOT, blocks_of, commands_of
from command_rules import rule_for
from forked_python import ENGINE_MODULES, forking_python
from rl_interfaces import PolicyConfig, resolve_policy_config
from rl_policy.config import load_run_config

from checks import changed

# Of minutes on a machine that does nothing else: what hangs ends.
PAGE_LIMIT_S = 900
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# For an engine in the program's own process, and one that is given few processors.
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
# Where a block is neither a program nor a file: what it is.
SHOWN = {
    "README.md": {"rl-policy ──[dtensor]──▶": "a drawing of who imports whom"},
    "docs/pages/how-to/async.md": {"engines   sample": "who works when"},
    "docs/pages/benchmarks.md": {"trl/generation/": "where a library ends, see grpo_step_vllm"},
    "docs/pages/design.md": {"rl_interfaces ": "the folders, see test_links.py"},
    "docs/pages/first-run.md": {
        "runs/first": "the files of a run, see test_a_run_leaves_what_the_page_says",
        "Run directory:": "what a run of minutes prints",
    },
}
# Groups of entry points that a page may name, and the file that looks each up.
GROUPS = {
    "rl_policy.workers": "packages/rl-policy/src/rl_policy/backends.py",
    "rl_policy.recipes": "packages/rl-policy/src/rl_policy/recipes/__init__.py",
    "rl_policy.trackers": "packages/rl-policy/src/rl_policy/run/trackers.py",
    "rl_policy.generation": "packages/rl-policy/src/rl_policy/backends.py",
    "rl_refit.transports": "packages/rl-refit/src/rl_refit/transports/__init__.py",
    "rl_megatron_worker.converters": (
        "packages/rl-megatron-worker/src/rl_megatron_worker/convert/registry.py"
    ),
}
# Programs that need a real vLLM: the nox session `vllm` runs them.
NEEDS_VLLM = {
    "packages/rl-refit/README.md": "from vllm import LLM",
    "docs/pages/how-to/any-trainer.md": "from vllm import LLM",
    "docs/pages/how-to/async.md": "engines = VllmGeneration(",
    "docs/pages/how-to/vllm-apart.md": "engines = VllmGeneration(",
}
# What `nox -s docs` alone runs: programs over Ray or torchrun, and what tells which backends are
# installed, as the workspace's environment has that of an example beside them.
SLOW_PAGES = {
    "docs/pages/first-run.md",
    "docs/pages/how-to/any-trainer.md",
    "docs/pages/how-to/checkpoints.md",
    "docs/pages/how-to/data.md",
    "docs/pages/how-to/environments.md",
    "docs/pages/how-to/megatron.md",
    "docs/pages/how-to/own-loop.md",
    "docs/pages/how-to/own-model.md",
    "docs/pages/how-to/own-reward.md",
    "docs/pages/how-to/plan.md",
    "docs/pages/how-to/python.md",
    "docs/pages/how-to/report.md",
    "docs/pages/how-to/torchrun.md",
    "docs/pages/how-to/write-a-backend.md",
    "docs/pages/install.md",
    "docs/pages/troubleshooting.md",
    "packages/rl-megatron-worker/README.md",
    "packages/rl-policy/README.md",
}
# Slow ones that tell what is installed.
STARTED_PLAINLY = {"docs/pages/install.md", "docs/pages/troubleshooting.md"}
# What the programs of the others import, and the ranks that they start; those with vLLM more.
PAGE_MODULES = [
    "torch.distributed.run",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.trainer",
    "rl_dtensor_worker.engine",
    "rl_refit",
]
# Installs an example, or a project whose files stand on the page: its entry points are registered
# for this page alone.
WRITTEN_PROJECT = re.compile(r"uv pip install (\./(?!packages/)[\w/-]+)")
pytestmark = pytest.mark.timeout(PAGE_LIMIT_S + 20)


@pytest.fixture(scope="session")
def forked_python():
    """Return a Python, with commands beside it, whose programs start with their imports."""
    commands = ("torchrun", "rl-policy")
    environment = os.environ | ENVIRONMENT
    with forking_python(PAGE_MODULES, commands=commands, environment=environment) as python:
        yield python


@pytest.fixture(scope="module")
def forked_python_with_vllm():
    """Return the same for the programs with vLLM."""
    modules = [*PAGE_MODULES, *ENGINE_MODULES]
    environment = os.environ | ENVIRONMENT | VLLM_ENVIRONMENT
    with forking_python(modules, environment=environment) as python:
        yield python


def steps_of(block):
    """Return what is run of a block, and the commands that are checked instead."""
    step = {"where": block.where, "text": block.text, "title": block.title}
    if block.included is not None:
        # It is run where it lives.
        assert (ROOT / block.included).is_file(), f"{block.where}: there is no {block.included}"
        return [], []
    if block.language == "toml":
        check_groups(tomllib.loads(block.text))
    if block.title is not None:
        return [step | {"kind": "file"}], []
    if block.language in ("python", "pycon"):
        return [step | {"kind": block.language}], []
    if block.language in ("bash", "console"):
        return steps_of_commands(block)
    check_data(block)
    return [], []


def steps_of_commands(block):
    run, checked = [], []
    for command, output in commands_of(block):
        rule = rule_for(command)
        step = {"kind": "command", "where": block.where, "text": command, "output": output}
        written = WRITTEN_PROJECT.fullmatch(command)
        if written is not None:
            example = ROOT / written.group(1)
            folder = str(example) if example.is_dir() else written.group(1)
            run.append(step | {"kind": "install", "text": folder})
        elif rule is None:
            run.append(step)
        else:
            checked.append((block.where, command, rule))
    return run, checked


def check_data(block):
    """Hold a block of settings, or a drawing, against what it could be."""
    if block.language == "yaml":
        check_settings(block)
    elif block.language == "text":
        known = SHOWN.get(block.page, {})
        assert any(block.text.startswith(start) for start in known), f"{block.where}: not in SHOWN"
    elif block.language != "toml":
        raise AssertionError(f"{block.where}: nobody runs {block.language!r}")


def check_groups(table):
    for group in table.get("project", {}).get("entry-points", {}):
        assert f'GROUP = "{group}"' in (ROOT / GROUPS[group]).read_text(), group


def check_settings(block):
    settings = yaml.safe_load(block.text)
    if set(settings) <= set(PolicyConfig.__annotations__):
        resolve_policy_config({"model_name": "model", **settings})
    else:
        path = Path("settings.yaml")
        path.write_text(block.text)
        load_run_config("grpo", path=path)


def test_the_pages_are_found():
    names = {str(page.relative_to(ROOT)) for page in PAGES}
    assert {"README.md", "CONTRIBUTING.md", "docs/pages/index.md"} <= names
    assert len([name for name in names if name.startswith("packages/")]) == 6


def needs_vllm(block):
    return block.language == "python" and NEEDS_VLLM.get(block.page, "\0") in block.text


def as_parameter(page):
    name = str(page.relative_to(ROOT))
    marks = {"README.md": pytest.mark.promise} | dict.fromkeys(SLOW_PAGES, pytest.mark.slow)
    return pytest.param(page, id=name, marks=marks.get(name, []))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_our_packages_are_installed_from_a_folder(page):
    """They are not on an index: without the folder of their wheels a command finds none."""
    if page.name == "install.md":  # It says so itself, with an example of a message.
        return
    for arguments in re.findall(r'pip install ((?:-f \S+ )?"?rl-[^`\n]*)', page.read_text()):
        assert arguments.startswith("-f dist "), f"{page}: pip install {arguments}"


@pytest.mark.parametrize("page", [as_parameter(page) for page in PAGES])
def test_the_blocks_of_a_page_do_what_they_say(page, workspace, request):
    name = str(page.relative_to(ROOT))
    python = sys.executable
    if name in SLOW_PAGES - STARTED_PLAINLY:
        python = request.getfixturevalue("forked_python")
    blocks = [block for block in blocks_of(page) if not needs_vllm(block)]
    plans = [steps_of(block) for block in blocks]
    steps = [step for run, _ in plans for step in run]
    check_files_are_read(blocks, steps)
    if steps:
        run_page(steps, os.environ | ENVIRONMENT, python=python)
    for where, command, rule in [entry for _, checked in plans for entry in checked]:
        try:
            rule.check(command)
        except Exception as error:
            raise AssertionError(f"{where}: {command}") from error


@pytest.mark.needs("rl-policy[all]")
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS_VLLM)
def test_a_program_with_vllm_runs(name, workspace, request):
    pytest.importorskip("vllm")
    python = request.getfixturevalue("forked_python_with_vllm")
    (block,) = [block for block in blocks_of(ROOT / name) if needs_vllm(block)]
    environment = os.environ | ENVIRONMENT | VLLM_ENVIRONMENT
    if "enforce_eager" in block.text:
        # Or helpers of vLLM would be compiled all the same.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    run_page(steps_of(block)[0], environment, python=python)


@pytest.mark.parametrize("name", NEEDS_VLLM)
def test_a_change_of_a_page_with_vllm_runs_it(name):
    matrix = json.loads(changed.job_matrix(changed.touched_packages([name]), [name]))
    assert matrix["vllm"]


def test_a_trainer_needs_few_lines_of_its_users():
    page = ROOT / "docs/pages/how-to/any-trainer.md"
    marked = re.findall(r'title="trainers/(\S+)" hl_lines="([\d -]+)"', page.read_text())
    assert {name for name, _ in marked} >= {"fsdp2.py", "callback.py", "zero3.py"}
    for name, lines in marked:
        ranges = [each.split("-") for each in lines.split()]
        count = sum(int(each[-1]) - int(each[0]) + 1 for each in ranges)
        assert count <= 25, f"{name} highlights {count} lines"


def check_files_are_read(blocks, steps):
    """Raise where a file is written for nobody, which would be a block that nobody runs."""
    checked = [command for b in blocks if b.language == "bash" for command, _ in commands_of(b)]
    text = "\n".join([*checked, *(step["text"] for step in steps if step["kind"] != "file")])
    for block in blocks:
        if block.title is not None:
            names = {block.title, str(Path(block.title).parent)} - {"."}
            assert any(name in text for name in names), f"{block.where}: no command reads it"


def run_page(steps, environment, *, python=sys.executable):
    """Run the steps of a page in a process of its own, in the working directory."""
    folders = dict.fromkeys(str(Path(each).parent) for each in (python, sys.executable))
    environment["PATH"] = os.pathsep.join([*folders, environment["PATH"]])
    # What a page's commands leave there, as torchrun does, goes with the page.
    temporary = Path("temporary").resolve()
    temporary.mkdir()
    environment["TMPDIR"] = str(temporary)
    plan = Path("steps.json")
    plan.write_text(json.dumps(steps))
    runner = Path(__file__).with_name("page_runner.py")
    done = subprocess.run(
        [python, str(runner), str(plan)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PAGE_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


PROBE = ROOT / "docs" / "probe.md"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```\nx\n```\n", "nobody runs ''"),
        ("```ruby\nx\n```\n", "nobody runs 'ruby'"),
        ("```text\nx\n```\n", "not in SHOWN"),
        ("```console\nx\n```\n", "begins with"),
        ('```toml\n[project.entry-points."rl_policy.worker"]\na = "b"\n```\n', "rl_policy.worker"),
        ("```yaml\npolicy: {dtensor_cfg: {tensor_paralel_size: 2}}\n```\n", "not a known key"),
    ],
)
def test_a_block_that_nobody_runs_is_found(workspace, text, message):
    (block,) = blocks_of(PROBE, text)
    with pytest.raises((AssertionError, ValueError, KeyError), match=message):
        steps_of(block)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nx = 1\n\nassert x == 2\n```\n", "probe.md.*line 4"),
        ("```pycon\n>>> 1 + 1\n3\n```\n", "does not print what it says"),
        ("```console\n$ echo one\ntwo\n```\n", "does not print"),
        ("- a list\n\n  ```bash\n  false\n  ```\n", "'false' exits with 1"),
        ("A paragraph.\n\n    false\n", "'false' exits with 1"),
    ],
)
def test_a_block_that_is_wrong_fails(workspace, text, message):
    steps = [step for block in blocks_of(PROBE, text) for step in steps_of(block)[0]]
    with pytest.raises(AssertionError, match=message):
        run_page(steps, os.environ | ENVIRONMENT)


@pytest.mark.parametrize(
    "command",
    [
        "rl-policy grpo policy.dtensor_cfg.tensor_paralel_size=2",
        "uv run nox -s no-such-session",
        'uv run nox -s "wheel(no-such-package)"',
        'pip install -f dist "rl-policy[no-such-extra]"',
        "pip install -f dist rl-no-such-package",
        "uv run pytest packages/no-such-package",
    ],
)
def test_a_command_that_could_not_be_run_is_found(workspace, command):
    with pytest.raises((AssertionError, OSError)):
        rule_for(command).check(command)
