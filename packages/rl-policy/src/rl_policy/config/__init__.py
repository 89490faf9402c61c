"""The configuration of a run: its sections and defaults, read from files and overrides."""

from rl_policy.config.loading import (
    load_run_config,
    override_resumed,
    parse_run_config,
    read_yaml,
    render_run_config,
)
from rl_policy.config.sections import (
    BUILTIN_RUN,
    DEFAULT_POLICY,
    CheckpointSection,
    ClusterSection,
    DataSection,
    GrpoSection,
    LossSection,
    RefitSection,
    RewardSection,
    RunConfig,
    Section,
    SftSection,
    TinyModelSection,
)

__all__ = [
    "BUILTIN_RUN",
    "DEFAULT_POLICY",
    "CheckpointSection",
    "ClusterSection",
    "DataSection",
    "GrpoSection",
    "LossSection",
    "RefitSection",
    "RewardSection",
    "RunConfig",
    "Section",
    "SftSection",
    "TinyModelSection",
    "load_run_config",
    "override_resumed",
    "parse_run_config",
    "read_yaml",
    "render_run_config",
]
