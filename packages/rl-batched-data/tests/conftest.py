import sys
from pathlib import Path

import pytest

# A spawned process inherits sys.path, and imports `spawned_ranks` from there.
sys.path.insert(0, str(Path(__file__).parent))

from spawned_ranks import run_on_ranks


@pytest.fixture
def on_gloo_ranks(tmp_path):
    """Return `run(world_size, function, *arguments)`; see `spawned_ranks.run_on_ranks`."""

    def run(world_size, function, *arguments):
        run_on_ranks(world_size, tmp_path, function, *arguments)

    return run
