"""A plan of a run's memory before it is launched: what each rank holds in each phase of a step.

settings --process--> traces of the worker (`rl_interfaces.backend.memory`)  --+
model's config --engines--> weights and cache of vLLM                        --+--> MemoryPlan
"""

from rl_policy.planning.request import parse_bytes, plan_memory
from rl_policy.planning.result import EngineShare, MemoryPlan, Part, Phase

__all__ = ["EngineShare", "MemoryPlan", "Part", "Phase", "parse_bytes", "plan_memory"]
