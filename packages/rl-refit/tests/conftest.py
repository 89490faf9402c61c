import gc
import sys
from pathlib import Path

import pytest

# A spawned process inherits sys.path, and imports the modules beside the tests from there.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module")
def frozen_imports():
    """Leave what is imported by now out of garbage collection, which rules of leftovers call."""
    gc.collect()
    gc.freeze()
