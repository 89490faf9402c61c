"""Images and other media: which columns of a batch the model's forward takes."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rl_batched_data import PackedTensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_interfaces.backend.steps import Step
    from transformers import PreTrainedModel

# `[batch, seq]` columns that mark whether a token is of an image or of text.
TOKEN_COLUMNS = ("mm_token_type_ids", "token_type_ids")


def media_of(model: PreTrainedModel, rows: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the media of a micro-batch, each kind concatenated, as the model's forward takes them.

    Raises:
        ValueError: The forward has no argument of that name.
    """
    packed = {key: value for key, value in rows.items() if isinstance(value, PackedTensor)}
    if not packed:
        return {}
    taken = inspect.signature(model.forward).parameters
    unknown = sorted(set(packed) - set(taken))
    if unknown:
        raise ValueError(
            f"the batch has the media {unknown}, which {type(model).__name__} does not take"
        )
    tensors = {key: value.as_tensor() for key, value in packed.items()}
    return {key: tensor for key, tensor in tensors.items() if tensor is not None}


def token_columns_of(model: PreTrainedModel, rows: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the columns of `TOKEN_COLUMNS` that the model's forward takes."""
    present = [key for key in TOKEN_COLUMNS if key in rows]
    taken = inspect.signature(model.forward).parameters if present else {}
    return {key: rows[key] for key in present if key in taken}


def check_same_media(
    steps: Sequence[Step], *, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raise on every rank unless all ranks have the same kinds of media in each pass. Collective.

    FSDP shards the layers that read media: if they ran on some ranks only, their all-gathers would
    wait for the others.

    Raises:
        ValueError: Kinds differ; the message names the kind and the micro-batch.
    """
    kinds = sorted({key for step in steps for key in _kinds(step)})
    if not kinds:
        return
    present = torch.tensor(
        [[_has(step.rows[kind], span) for kind in kinds] for step in steps for span in step.spans],
        dtype=torch.int64,
        device=device,
    )
    some, every = present.clone(), present.clone()
    dist.all_reduce(some, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(every, op=dist.ReduceOp.MIN, group=group)
    uneven = (some != every).nonzero().tolist()
    if uneven:
        number, kind = uneven[0]
        raise ValueError(
            f"micro-batch {number} has {kinds[kind]!r} on some ranks and none on others: give "
            "every rank's micro-batches rows with media, or none"
        )


def _kinds(step: Step) -> list[str]:
    return [key for key, value in step.rows.items() if isinstance(value, PackedTensor)]


def _has(column: PackedTensor, span: tuple[int, int]) -> bool:
    return any(column.tensors[row] is not None for row in range(*span))
