import sys
from pathlib import Path

import pytest
from hypothesis import settings

# A spawned process inherits sys.path, and imports `spawned_ranks` from there.
sys.path.insert(0, str(Path(__file__).parent))

from spawned_ranks import run_on_ranks

# No time is a fault where other work may share the processor.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture
def on_gloo_ranks(tmp_path):
    """Return `run(world_size, function, *arguments)`; see `spawned_ranks.run_on_ranks`."""

    def run(world_size, function, *arguments):
        run_on_ranks(world_size, tmp_path, function, *arguments)

    return run
