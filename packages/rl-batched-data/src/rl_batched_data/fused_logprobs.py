"""Log-probabilities by Liger's fused output layer and cross entropy, from the extra `liger`.

Liger has a kernel for GPUs of compute capability 9.0, with `liger-kernel[cutedsl]`, and one for
tensor parallelism on 9.0 and 10.x; on other devices it computes in tiles as `logprobs` does. It
gives log-probabilities and entropies of a plain output matrix, which is what this module asks for.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from rl_batched_data.logprobs_kernel import ScoringTask


def fused_scores(
    hidden: torch.Tensor,
    matrix: torch.Tensor | None,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    task: ScoringTask,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities of `targets`, and entropies if `task` asks for them.

    Args:
        hidden: `[tokens, hidden]`, at least one token.
        matrix: `[vocab, hidden]` in the same dtype; with a `tp_group` this rank's shard.
        bias: Has to be None.
        targets: `[tokens]` int64.
        task: Without soft cap and top-k.

    Returns:
        `[tokens]` float32 each. Entropies have been rounded to the dtype of `hidden` by Liger on
        some devices.

    Raises:
        ValueError: Liger does not compute these scores, or a target is outside the vocabulary.
        ImportError: It is not installed; the message says how it would be.
    """
    transform = task.transform
    start = 0 if task.tp_group is None else dist.get_rank(task.tp_group) * task.vocab_size
    for applies, what in (
        (matrix is None, "no output_matrix"),
        (bias is not None, "an output_bias"),
        (transform.soft_cap is not None, f"soft_cap={transform.soft_cap}"),
        (transform.scale <= 0, f"logit_scale={transform.scale}"),
        (task.top_k > 0, f"top_k={task.top_k}"),
        (task.vocab_start != start, "shards of the vocabulary that are not equally large"),
    ):
        if applies:
            raise ValueError(f"fused=True does not support {what}")
    if find_spec("liger_kernel") is None:
        raise ImportError(
            "fused log-probabilities need liger-kernel, which is not installed: "
            'pip install "rl-batched-data[liger]"'
        )
    # It brings triton, and takes seconds.
    liger: Any = import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    temperature = transform.temperature / transform.scale
    options: dict[str, Any] = {"return_entropy": task.with_entropy}
    if task.tp_group is None:
        scores = liger.LigerFusedLinearScaledCrossEntropyFunction.apply(
            hidden, matrix, targets, temperature, **options
        )
    else:
        scores = liger.LigerFusedLinearScaledCrossEntropyTPFunction.apply(
            hidden, matrix, targets, task.tp_group, temperature, **options
        )
    if task.with_entropy:
        return -scores[0], scores[1].float()
    return -scores, None
