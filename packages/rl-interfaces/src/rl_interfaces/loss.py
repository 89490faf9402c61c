"""The protocol of loss functions."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


class LossType(Enum):
    """What a loss is averaged over, and so the global count it is divided by."""

    TOKEN_LEVEL = "token_level"
    """Divided by the number of valid target tokens of the global batch."""
    SEQUENCE_LEVEL = "sequence_level"
    """Divided by the number of valid sequences of the global batch."""


class LossInput(Enum):
    """The kind of tensor that a loss takes as its first argument."""

    LOGITS = "logits"
    """`[batch, seq, vocab]`: position `t` scores token `t + 1`."""
    LOGPROBS = "logprobs"
    """`[batch, seq]` float32: position `t` holds log p(token `t` | tokens before it); 0 at 0."""


@runtime_checkable
class LossFunction(Protocol):
    """A loss over one micro-batch, normalised by the counts of the global batch.

    The value is a sum over the micro-batch divided by a *global* count. The sum of the values over
    all micro-batches and all data-parallel ranks is then the loss of the global batch, whatever its
    division into micro-batches, packs or ranks.

    Five attributes are optional:
    - `input_type` (a `LossInput`; absent means `LOGITS`);
    - `accepts_sharded_logits` (absent means False; read with `LOGITS` only): True lets a
      tensor-parallel backend pass the logits as a `torch.distributed.tensor.DTensor` of global
      shape `[batch, seq, vocab]`, sharded along the last dim over the tensor-parallel ranks,
      instead of gathering them. `to_local()` gives this rank's shard, `device_mesh` the ranks that
      hold the others, `full_tensor()` the full logits. The loss is the same value on all of these
      ranks. A backend whose logits are not sharded passes a plain tensor;
    - `uses_sampling_temperature` (absent means True): whether the logits are divided by
      `policy.generation.temperature`, as the policy gradient of sampled tokens needs. A supervised
      loss sets it to False: its value is that of the model itself;
    - `rows_per_group` (int; absent means 1): consecutive rows that the loss needs in one
      micro-batch, for example 2 for a chosen and a rejected completion. The batch, `gbs` per
      data-parallel rank and a fixed `mbs` are then multiples of it; a masked micro-batch that
      replaces missing rows has as many rows;
    - `returns_rows` (absent means False): True if the loss returns a third value, a mapping of
      names to `[batch]` or `[batch, seq]` tensors. Those of all micro-batches come back from
      `train` and `forward_backward` under the key `rows`, in the caller's order.

    Example, a token-level loss over two micro-batches with 3 and 1 valid tokens:
        global_valid_toks = 4
        micro-batch 1: values 1.0 + 2.0 + 3.0 -> 6.0 / 4 = 1.5
        micro-batch 2: value  4.0             -> 4.0 / 4 = 1.0
        loss of the global batch: 1.5 + 1.0 = 2.5, the mean of the four values
    """

    loss_type: LossType

    def __call__(
        self,
        next_token_logits: torch.Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> (
        tuple[torch.Tensor, Mapping[str, float | torch.Tensor]]
        | tuple[torch.Tensor, Mapping[str, float | torch.Tensor], Mapping[str, torch.Tensor]]
    ):
        """Return the micro-batch's share of the global loss, and its metrics.

        Args:
            next_token_logits: Logits or token log-probabilities, according to `input_type`; a
                `DTensor` only where `accepts_sharded_logits` is True.
            data: The micro-batch, in the caller's row layout.
            global_valid_seqs: 0-d; sum of `sample_mask` over the global batch.
            global_valid_toks: 0-d; sum of `token_mask[:, 1:] * sample_mask[:, None]` over it.

        Returns:
            The 0-d loss, and numbers by name, `num_valid_samples` among them. A 0-d tensor becomes
            a number. With `returns_rows` also the tensors of each row, by name.
        """
        ...
