"""Whether a model scores concatenated sequences as it scores each of them alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from rl_batched_data import PackedSequences, SlicedDataDict

from rl_dtensor_worker.microbatches import MicroBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

# The largest difference that rounding makes, relative to the largest log-probability. Attention
# that sees the sequence before moves log-probabilities by about as much as they are.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_LENGTHS = (11, 7, 2)


@torch.no_grad()
def check_packing(
    model: nn.Module,
    score: Callable[[MicroBatch], torch.Tensor],
    *,
    compute_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise unless packed sequences get the scores that padded ones get. Collective.

    Which attention keeps sequences apart is not something that its name tells: custom kernels,
    linear attention and convolutions may all read across the border. So it is tried.

    Args:
        model: The model.
        score: Returns the score of each token, `[batch, seq]`.
        compute_dtype: What the model computes in.
        device: Where it is.

    Raises:
        ValueError: They differ; the message names the attention and the difference.
    """
    config: Any = model.config
    batch = _random_rows(config.get_text_config().vocab_size).to(device)
    span = (0, batch.size)
    packed = PackedSequences.of(batch["input_lengths"], batch["input_ids"].shape[1])
    scores = [score(MicroBatch(span=span, rows=batch, packed=layout)) for layout in (None, packed)]
    difference = float((scores[0] - scores[1]).abs().max() / scores[0].abs().max())
    if not difference <= _TOLERANCES[compute_dtype]:
        attention = getattr(config, "_attn_implementation", "unknown")
        raise ValueError(
            f"policy.sequence_packing.enabled=True: with attention {attention!r}, "
            f"{type(model).__name__} lets packed sequences see one another "
            f"(their scores differ by {difference:.2g} of the largest): use another "
            "attention, or policy.dynamic_batching"
        )


def _random_rows(vocab_size: int) -> SlicedDataDict:
    generator = torch.Generator().manual_seed(0)
    shape = (len(_LENGTHS), max(_LENGTHS))
    return SlicedDataDict(
        {
            "input_ids": torch.randint(vocab_size, shape, generator=generator),
            "input_lengths": torch.tensor(_LENGTHS),
        }
    )
