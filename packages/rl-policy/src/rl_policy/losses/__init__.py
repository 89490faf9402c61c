"""Losses over token log-probabilities: policy gradient, supervised and preference losses.

All obey `rl_interfaces.LossFunction`: the value of a micro-batch is a sum divided by a count over
the *global* batch, so that the values of all micro-batches and data-parallel ranks add up to the
loss of the batch. So do the metrics, which are numbers of the global batch once they are added up.
"""

from rl_policy.losses.policy_gradient import ClippedPGLoss
from rl_policy.losses.preference import DPOLoss
from rl_policy.losses.supervised import NLLLoss

__all__ = ["ClippedPGLoss", "DPOLoss", "NLLLoss"]
