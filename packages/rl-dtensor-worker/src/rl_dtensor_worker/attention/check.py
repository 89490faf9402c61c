"""Whether a model scores tokens in the layout it trains in as it scores them in padded rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from rl_batched_data import SlicedDataDict
from rl_interfaces.backend.steps import MicroBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from rl_dtensor_worker.parallel.sharing import Sharing

# The largest difference that rounding makes, relative to the largest log-probability. Attention
# that sees the sequence before moves log-probabilities by about as much as they are.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_LENGTHS = (11, 7, 2)


_ROTATIONS_BY_LENGTH = ("longrope", "dynamic")


def check_rotation(model_config: Any, *, context_parallel_size: int) -> None:
    """Raise where ranks with parts of a sequence would rotate it by different frequencies.

    Raises:
        ValueError: The model's frequencies depend on the last position, which one rank alone has.
    """
    given: dict[str, Any] = getattr(model_config.get_text_config(), "rope_parameters", None) or {}
    by_layer = [each for each in given.values() if isinstance(each, dict)]
    for parameters in by_layer or [given]:
        if context_parallel_size > 1 and parameters.get("rope_type") in _ROTATIONS_BY_LENGTH:
            raise ValueError(
                f"policy.dtensor_cfg.context_parallel_size={context_parallel_size} takes no model "
                f"with rope_type={parameters['rope_type']!r}: its frequencies depend on the length "
                "of the sequence, of which each rank has a part"
            )


@torch.no_grad()
def check_layout(
    model: nn.Module,
    score: Callable[[MicroBatch], torch.Tensor],
    *,
    sharing: Sharing,
    feature: str,
    compute_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise unless tokens get the scores that they get in padded rows. Collective.

    Which attention keeps concatenated sequences apart, or can do with a part of a sequence, is not
    something that its name tells: custom kernels, linear attention and convolutions may all read
    across the border. So it is tried.

    Args:
        model: The model.
        score: Returns the score of each token, `[batch, seq]`.
        sharing: The ranks that run a forward together.
        feature: The config key that asks for the layout, with its value.
        compute_dtype: What the model computes in.
        device: Where it is.

    Raises:
        ValueError: They differ; the message names the attention and the difference.
    """
    config: Any = model.config
    batch = _random_rows(config.get_text_config().vocab_size)
    packs = sharing.context_group is not None or feature.startswith("sequence_packing")
    packed = sharing.concatenation().of(batch).to(device) if packs else None
    rows, span = batch.to(device), (0, batch.size)
    with sharing.whole_sequences():
        expected = score(MicroBatch(span=span, rows=rows))
    found = score(MicroBatch(span=span, rows=rows, packed=packed))
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= _TOLERANCES[compute_dtype]:
        attention = getattr(config, "_attn_implementation", "unknown")
        raise ValueError(
            f"policy.{feature}: with attention {attention!r}, {type(model).__name__} lets "
            "sequences see one another, or loses a part of them (their scores differ by "
            f"{difference:.2g} of the largest): use another attention, or policy.dynamic_batching"
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
