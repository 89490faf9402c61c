"""Fixtures: ranks of a job."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # forked ranks inherit it, and import the same

from rank_pool import RankPool


@pytest.fixture(scope="session")
def pools():
    """`pools(n).run(function, **kwargs)` runs a function as `n` ranks of a job."""
    return RankPool
