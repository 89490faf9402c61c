import sys
from pathlib import Path

# Tests import the modules beside them.
sys.path.insert(0, str(Path(__file__).parent))
