"""The configuration of a run: its sections and defaults, read from files and overrides."""

from rl_interfaces.config.resolve import merge_sections

from rl_policy.config.loading import (
    load_run_config,
    override_resumed,
    parse_overrides,
    parse_run_config,
    read_yaml,
    render_run_config,
)
from rl_policy.config.policy import (
    BUILTIN_POLICY,
    DEFAULT_POLICY,
    Settings,
    merge_policy,
    resolve_policy,
)
from rl_policy.config.sections import (
    CheckpointSection,
    ClusterSection,
    DataSection,
    RefitSection,
    RewardSection,
    RunConfig,
    Section,
    TinyModelSection,
    check_sampling,
    run_config_type,
)

__all__ = [
    "BUILTIN_POLICY",
    "DEFAULT_POLICY",
    "CheckpointSection",
    "ClusterSection",
    "DataSection",
    "RefitSection",
    "RewardSection",
    "RunConfig",
    "Section",
    "Settings",
    "TinyModelSection",
    "check_sampling",
    "load_run_config",
    "merge_policy",
    "merge_sections",
    "override_resumed",
    "parse_overrides",
    "parse_run_config",
    "read_yaml",
    "render_run_config",
    "resolve_policy",
    "run_config_type",
]
