"""What each package may bring and load when it is installed alone, or with one of its extras."""

from __future__ import annotations

import json
from typing import Any

from packaging.requirements import Requirement

from checks.workspace import PROJECTS, ROOT, extras, import_name

# What importing a package must not load, whatever is installed, and installing it alone not bring.
FORBIDDEN = {
    "rl-interfaces": [
        *("torch", "numpy", "transformers", "safetensors", "pydantic", "pytest", "ray", "vllm"),
        *("rl_batched_data", "rl_refit", "rl_policy"),
    ],
    "rl-batched-data": ["transformers", "ray", "vllm", "rl_interfaces", "rl_refit", "rl_policy"],
    "rl-refit": ["transformers", "ray", "vllm", "rl_interfaces", "rl_batched_data", "rl_policy"],
    "rl-dtensor-worker": ["ray", "vllm", "megatron", "peft", "rl_megatron_worker", "rl_policy"],
    "rl-megatron-worker": ["ray", "vllm", "peft", "rl_dtensor_worker", "rl_policy"],
    "rl-policy": ["rl_dtensor_worker", "rl_megatron_worker", "megatron", "vllm", "peft"],
}
# The packages that bring these distributions and no other.
BRINGS = {"rl-interfaces": ["rl-interfaces", "typing-extensions"]}
# The modules that an extra is for; they need what it brings.
EXTRA_MODULES = {
    "rl-interfaces": {
        "backend": ["rl_interfaces.backend"],
        "testing": ["rl_interfaces.testing"],
    },
    "rl-refit": {"vllm": ["rl_refit.vllm"]},
}
# What an extra makes possible.
WORKS = {
    "rl-dtensor-worker[lora]": "import peft",
    **{
        f"rl-policy[{name}]": f"from rl_policy.backends import load; load({name!r})"
        for name in ("dtensor", "megatron")
    },
    "rl-policy[lora]": "import peft; from rl_policy.backends import load; load('dtensor')",
    **{
        f"rl-policy[{name}]": "from rl_policy.backends import load_engine\n"
        "from rl_policy.generation.vllm.engine import require_vllm\n"
        "load_engine('vllm'); require_vllm()"
        for name in ("vllm", "all")
    },
}
# What asks for an extra that is not there, and what the ImportError must then say.
_ENABLED = "from rl_policy.backends import enabled_backend, load; load(enabled_backend({!r}))"
REFUSALS = {
    "rl-dtensor-worker": [
        (
            "from rl_dtensor_worker.lora import inject_adapters as inject\n"
            "inject(None, None, model_name='')",
            'pip install "rl-dtensor-worker[lora]"',
        )
    ],
    "rl-policy": [
        (
            "from rl_policy.backends import load; load('dtensor')",
            'pip install "rl-policy[dtensor]"',
        ),
        *(
            (_ENABLED.format({f"{name}_cfg": {"enabled": True}}), f'"rl-policy[{name}]"')
            for name in ("dtensor", "megatron")
        ),
        (
            "from rl_policy.generation.vllm.engine import require_vllm; require_vllm()",
            'pip install "rl-policy[vllm]"',
        ),
    ],
}


# The tests that an extra is for: files of the package's tests or parts of them, or paths from the
# root. Files that none of them names are run where a package is installed alone.
TESTS = {
    "rl-interfaces[backend]": ["test_directories.py", "test_reserved_port.py"],
    "rl-interfaces[testing]": [
        "test_conformance_plugin.py",
        "test_conformance_ranks.py",
        "test_conformance_rules.py",
        "test_conformance_worker.py",
        "test_generation_conformance.py",
        "test_transport_conformance.py",
    ],
    "rl-refit[testing]": [
        "test_broadcast.py",
        "test_conformance.py",
        "test_faults.py",
        "test_gpu.py",
        "test_kills.py",
        "test_transport_rules.py",
    ],
    "rl-refit[vllm]": ["test_vllm.py"],
    "rl-dtensor-worker[lora]": ["test_conformance.py", "test_lora.py", "test_lora_heads.py"],
    "rl-policy[dtensor]": [
        "test_cli.py",
        "test_conformance_generation.py::TestPolicy",
        "test_policy.py",
        "test_recipes.py",
        "test_samplers.py",
    ],
    "rl-policy[lora]": [
        "test_policy.py::test_adapters_are_saved_as_peft_reads_them",
        "test_recipes.py::test_adapters_alone_are_trained_after_a_warm_up_of_all",
    ],
    "rl-policy[megatron]": ["test_policy_megatron.py"],
    "rl-policy[vllm]": [
        "test_conformance_generation.py::TestVllm",
        "test_vllm_engine.py",
        "test_vllm_refit.py",
        "test_vllm_tensor_parallel.py",
    ],
    "rl-policy[all]": [
        "test_both_backends.py",
        "test_grpo_vllm.py",
        "test_vllm_colocated.py",
        "test_vllm_experts.py",
        *(
            f"packages/{worker}/tests/test_weights.py::test_it_has_all_that_vllm_asks_of_a_source"
            for worker in ("rl-dtensor-worker", "rl-megatron-worker")
        ),
        "docs/tests/test_code_blocks.py::test_a_program_with_vllm_runs",
    ],
}


def paths_to_test(requirement: str) -> list[str]:
    """Return what pytest is to run where `requirement` is installed, as absolute paths."""
    wanted = Requirement(requirement)
    folder = ROOT / "packages" / wanted.name / "tests"
    if wanted.extras:
        listed = TESTS[requirement]
        return [str(ROOT / name if "/" in name else folder / name) for name in listed]
    of_extras = {
        name.partition("::")[0]
        for other, names in TESTS.items()
        if Requirement(other).name == wanted.name
        for name in names
    }
    found = sorted(folder.glob("test_*.py"))
    return [str(path) for path in found if path.name not in of_extras]


def requirements() -> list[str]:
    """Return every package alone, and with each of its extras."""
    return [
        wanted
        for package in PROJECTS
        for wanted in (package, *(f"{package}[{extra}]" for extra in sorted(extras(package))))
    ]


def probe_request(requirement: str) -> str:
    """Return what `probe.py` is to check of an installed `requirement`."""
    wanted = Requirement(requirement)
    modules = EXTRA_MODULES.get(wanted.name, {})
    alone = not wanted.extras
    request = {
        "package": import_name(wanted.name),
        "extra_modules": [name for names in modules.values() for name in names],
        "wanted": [name for extra in wanted.extras for name in modules.get(extra, [])],
        "forbidden": FORBIDDEN[wanted.name],
        "absent": alone,
        "brings": BRINGS.get(wanted.name) if alone else None,
        "works": WORKS.get(requirement),
        "refusals": REFUSALS.get(wanted.name, []) if alone else [],
    }
    return json.dumps(request)


def format_table(rows: dict[str, dict[str, Any]]) -> str:
    """Return what was measured, as a table.

    Args:
        rows: By requirement, what `probe.py` printed.
    """
    lines = [f"{'installed':<30}{'distributions':>14}{'MB':>8}{'modules':>9}{'import s':>10}"]
    lines += [
        f"{name:<30}{row['distributions']:>14}{row['bytes'] / 1e6:>8.1f}{row['modules']:>9}"
        f"{row['seconds']:>10.2f}"
        for name, row in rows.items()
    ]
    return "\n".join(lines)
