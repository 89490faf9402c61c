"""What every rank starts with: imported once, by the server that they are forked from.

Modules are objects by the hundred thousand and none is garbage: ranks that looked among them for
some would also get a copy of each page.
"""

import gc
from importlib import import_module
from pathlib import Path

_RANKS = sorted(Path(__file__).parent.glob("*_ranks.py"))

gc.disable()
for name in ["rl_megatron_worker", "megatron_case", *(path.stem for path in _RANKS)]:
    import_module(name)
gc.freeze()
gc.enable()
