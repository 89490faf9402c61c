"""The configuration of a run: its sections and defaults, read from files and overrides.

    YAML file, then section.key=value  --over-->  defaults  --checked-->  RunConfig  -->  YAML

Keys, types and ranges are pydantic's to check; the section `policy` is
`rl_interfaces.resolve_policy_config`'s.
"""

from rl_policy.config.loading import (
    flatten,
    join_settings,
    load_run_config,
    nest,
    new_run_config,
    override_resumed,
    override_resumed_with,
    parse_run_config,
    parse_run_overrides,
    parse_section,
    parse_server,
    read_yaml,
    render_run_config,
)
from rl_policy.config.overrides import add_arithmetic, parse_overrides
from rl_policy.config.policy import (
    BUILTIN_MODEL,
    BUILTIN_POLICY,
    DEFAULT_POLICY,
    Settings,
    merge_policy,
    naming_section,
    resolve_policy,
)
from rl_policy.config.sections import (
    EXACT_MATCH,
    CheckpointSection,
    ClusterSection,
    DataSection,
    EnvironmentSection,
    RefitSection,
    ReportSection,
    RewardSection,
    RunConfig,
    Section,
    TinyModelSection,
    TrackingSection,
    run_config_type,
)

__all__ = [
    "BUILTIN_MODEL",
    "BUILTIN_POLICY",
    "DEFAULT_POLICY",
    "EXACT_MATCH",
    "CheckpointSection",
    "ClusterSection",
    "DataSection",
    "EnvironmentSection",
    "RefitSection",
    "ReportSection",
    "RewardSection",
    "RunConfig",
    "Section",
    "Settings",
    "TinyModelSection",
    "TrackingSection",
    "add_arithmetic",
    "flatten",
    "join_settings",
    "load_run_config",
    "merge_policy",
    "naming_section",
    "nest",
    "new_run_config",
    "override_resumed",
    "override_resumed_with",
    "parse_overrides",
    "parse_run_config",
    "parse_run_overrides",
    "parse_section",
    "parse_server",
    "read_yaml",
    "render_run_config",
    "resolve_policy",
    "run_config_type",
]
