"""Fixtures: ranks of a job."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("megatron") is None:
    # Beside tests of other packages, where Megatron-core is not installed.
    collect_ignore_glob = ["test_*.py"]

sys.path.insert(0, str(Path(__file__).parent))  # forked ranks inherit it, and import the same

from forked_ranks import RankPool


@pytest.fixture(scope="session")
def pools():
    """`pools(n).run(function, **kwargs)` runs a function as `n` ranks of a job."""
    return RankPool
