import sys
from pathlib import Path

from hypothesis import settings

# Tests import the modules beside them.
sys.path.insert(0, str(Path(__file__).parent))

# No time is a fault where other work may share the processor.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
