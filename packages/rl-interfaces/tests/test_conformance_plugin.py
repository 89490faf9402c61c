"""The plug-in: what loading it loads, and what it tells at the end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

pytestmark = pytest.mark.needs("rl-interfaces[testing]")

HERE = Path(__file__).parent
LOADED = """
import sys
import pytest

class Look:
    def pytest_sessionfinish(self, session):
        plugin = session.config.pluginmanager.get_plugin("rl_interfaces")
        print("plugin:", getattr(plugin, "__name__", None), "torch:", "torch" in sys.modules)

sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", sys.argv[1]], plugins=[Look()]))
"""
SUITE = """
import pytest
from plain_conformance_case import plain_case
from plain_policy_worker import PlainWorker
from rl_interfaces.testing import WorkerConformance

@pytest.fixture(scope="module")
def worker_case(tmp_path_factory):
    return plain_case(tmp_path_factory.mktemp("model"), {worker})

class TestMine(WorkerConformance):
    @pytest.mark.parametrize("size", [1, 2])
    def test_of_its_own(self, size):
        pass
"""


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | environment,
    )


def test_loading_the_plugin_does_not_load_torch(tmp_path):
    (tmp_path / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    result = run("-c", LOADED, str(tmp_path))
    assert "plugin: rl_interfaces.testing.plugin torch: False" in result.stdout, result.stderr


def run_suite(path, worker, *choice):
    (path / "test_suite.py").write_text(SUITE.format(worker=worker))
    return run("-m", "pytest", "-q", str(path), *choice, PYTHONPATH=str(HERE))


def test_a_suite_tells_what_does_not_apply_and_why(tmp_path):
    result = run_suite(tmp_path, "PlainWorker", "-k", "topk or unknown_keys or of_its_own")
    assert result.returncode == 0, result.stdout
    assert "test_suite.py::TestMine: 1 passed, 1 skipped" in result.stdout
    assert "3 passed, 1 skipped" in result.stdout
    lack = "PlainWorker lacks get_topk_logits of rl_interfaces.TopkLogitsWorker"
    assert f"skipped: topk_logits_equal_the_oracle ({lack})" in result.stdout


def test_a_suite_fails_where_a_rule_is_broken(tmp_path):
    worker = "type('Nobody', (PlainWorker,), {'is_alive': lambda self: False})"
    result = run_suite(tmp_path, worker, "-k", "says_where or unknown_keys")
    assert result.returncode == 1, result.stdout
    assert "test_suite.py::TestMine: 1 passed, 1 failed" in result.stdout
    assert "failed: a_worker_says_where_it_is" in result.stdout
    assert "is_alive() is not True" in result.stdout
