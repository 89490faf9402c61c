"""How much memory a worker takes, traced without allocating any.

    config of a model --stand_in--> files without bytes --trace--> peaks by call and by place

The worker is the one that runs: it shards, reads and computes on a `fake_cpu`, whose tensors are
shapes alone.
"""

from rl_interfaces.backend.memory.depth import Depths, extrapolate, plan_depths
from rl_interfaces.backend.memory.stand_in import (
    TokenIds,
    empty_language_model,
    shallow_config,
    write_stand_in,
)
from rl_interfaces.backend.memory.trace import (
    MemoryTracedWorker,
    PhaseTrace,
    TraceRequest,
    WorkerTrace,
    trace_worker,
)

__all__ = [
    "Depths",
    "MemoryTracedWorker",
    "PhaseTrace",
    "TokenIds",
    "TraceRequest",
    "WorkerTrace",
    "empty_language_model",
    "extrapolate",
    "plan_depths",
    "shallow_config",
    "trace_worker",
    "write_stand_in",
]
