import subprocess
import sys

import pytest
from patience import PATIENCE_S

pytestmark = pytest.mark.promise

HEAVY = ["torch", "ray", "numpy", "transformers", "pydantic", "rl_batched_data"]
# The heavy modules are stood in for, so that an import of them shows wherever the tests run.
IMPORT_EVERY_MODULE = f"""
import importlib, importlib.abc, pkgutil, sys

class Forbid(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise AssertionError(f"imports {{name}}")

sys.meta_path.insert(0, Forbid())
package = importlib.import_module("rl_interfaces")
for module in pkgutil.iter_modules(package.__path__, "rl_interfaces."):
    if module.name != "rl_interfaces.backend":  # the extra that needs torch
        importlib.import_module(module.name)
print(*(name for name in {HEAVY!r} if name in sys.modules))
"""


def run_isolated(code):
    return subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )


def test_no_module_imports_anything_heavy():
    result = run_isolated(IMPORT_EVERY_MODULE)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


@pytest.mark.parametrize("name", HEAVY)
def test_the_finder_of_heavy_imports_finds_them(name):
    result = run_isolated(f"{IMPORT_EVERY_MODULE}\nimport {name}")
    assert result.returncode == 1
    assert f"imports {name}" in result.stderr


def test_every_public_name_is_there_once():
    import rl_interfaces

    assert len(set(rl_interfaces.__all__)) == len(rl_interfaces.__all__)
    for name in rl_interfaces.__all__:
        assert hasattr(rl_interfaces, name)
