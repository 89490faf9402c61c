"""The process of `run_on_fake_cuda`: `python -m ... module:function RESULT < arguments`."""

import gc
import json
import os
import sys
from importlib import import_module
from pathlib import Path

from rl_interfaces.testing.fake_cuda.guard import load

if __name__ == "__main__":
    target, result = sys.argv[1:]
    load()
    module, _, function = target.partition(":")
    # What is imported is no garbage, and is not looked through again for what is.
    gc.disable()
    call = getattr(import_module(module), function)
    gc.freeze()
    gc.enable()
    value = call(**json.load(sys.stdin))
    Path(result).write_text(json.dumps(value))
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of libraries abort the interpreter at its end now and then; the result is written.
    os._exit(0)
