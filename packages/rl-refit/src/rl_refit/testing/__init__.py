"""The conformance kit for transports: every bit arrives, and no fault goes unnoticed.

As pytest tests, here for a transport that is registered as `mine`:

    from rl_refit.testing import RefitPair, TransportConformance

    class TestMine(TransportConformance):
        pair = RefitPair("mine")

Or as a plain call, `check_transport(RefitPair("mine"))`, which raises with a list of what failed.
Neither a trainer nor an engine is needed. `conformance` lists the rules, `pair` makes the two ends
and injects faults.
"""

from rl_refit.testing.conformance import (
    RULES,
    ConformanceError,
    TransportConformance,
    check_rule,
    check_transport,
    rule_names,
)
from rl_refit.testing.pair import Announcement, DrillSender, Fault, RefitPair

__all__ = [
    "RULES",
    "Announcement",
    "ConformanceError",
    "DrillSender",
    "Fault",
    "RefitPair",
    "TransportConformance",
    "check_rule",
    "check_transport",
    "rule_names",
]
