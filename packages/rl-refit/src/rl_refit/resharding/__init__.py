"""A refit without a full gather: each rank sends the slices that each engine rank consumes.

`slices` has boxes of tensors, `layouts` where they lie over ranks, `consumers` what an engine's
loader wants (with `views`, `accesses`), `planner` who sends what to whom, `exchange` the transfer,
`messages` its slices and patches, `bases` what patches are made of, `digest` its checksums,
`members` who takes part, `refit` both ends under the commit protocol.
"""

from rl_refit.resharding.exchange import Exchange, ExchangeReport
from rl_refit.resharding.layouts import ParallelLayout, Placed, Shard, local_shards
from rl_refit.resharding.messages import Want
from rl_refit.resharding.planner import ReshardPlan, imbalance, plan_pieces
from rl_refit.resharding.refit import ReshardSender, SliceReceiver
from rl_refit.resharding.slices import Box

__all__ = [
    "Box",
    "Exchange",
    "ExchangeReport",
    "ParallelLayout",
    "Placed",
    "ReshardPlan",
    "ReshardSender",
    "Shard",
    "SliceReceiver",
    "Want",
    "imbalance",
    "local_shards",
    "plan_pieces",
]
