"""Check that a model supports a layout: scores must equal those of padded rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from rl_batched_data import SlicedDataDict
from rl_interfaces.backend.steps import MicroBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from rl_dtensor_worker.parallel.context import ParallelContext

# Bounds on rounding, relative to the largest log-probability. Attention that leaks across sequences
# changes log-probabilities by about their own magnitude.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_LENGTHS = (11, 7, 2)


_ROTATIONS_BY_LENGTH = ("longrope", "dynamic")


def check_rotation(model_config: Any, *, context_parallel_size: int) -> None:
    """Raise if context-parallel ranks would use different rotary frequencies.

    Raises:
        ValueError: The model's frequencies depend on the sequence length, and a rank has a shard.
    """
    given: dict[str, Any] = getattr(model_config.get_text_config(), "rope_parameters", None) or {}
    by_layer = [each for each in given.values() if isinstance(each, dict)]
    for parameters in by_layer or [given]:
        if context_parallel_size > 1 and parameters.get("rope_type") in _ROTATIONS_BY_LENGTH:
            raise ValueError(
                f"policy.dtensor_cfg.context_parallel_size={context_parallel_size} does not "
                f"support rope_type={parameters['rope_type']!r}: its frequencies depend on the "
                "length of the sequence, of which each rank has a shard"
            )


@torch.no_grad()
def check_layout(
    model: PreTrainedModel,
    score: Callable[[MicroBatch], torch.Tensor],
    *,
    parallel: ParallelContext,
    feature: str,
    compute_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise unless tokens get the same scores as in padded rows. Collective.

    Whether a model keeps packed sequences separate, or supports sharded ones, cannot be read from
    its config: custom kernels, linear attention and convolutions may all read across a boundary.
    So three random rows are scored in both layouts.

    Args:
        model: The model.
        score: Returns the score of each token, `[batch, seq]`.
        parallel: The ranks that run one forward together.
        feature: The config key that needs the layout, with its value.
        compute_dtype: The model's compute dtype.
        device: Where it is.

    Raises:
        ValueError: Scores differ; the message names the attention and the difference.
    """
    config: Any = model.config
    batch = _random_rows(config.get_text_config().vocab_size)
    packs = parallel.context_group is not None or feature.startswith("sequence_packing")
    packed = parallel.concatenation().of(batch).to(device) if packs else None
    rows, span = batch.to(device), (0, batch.size)
    with parallel.unsharded_sequences():
        expected = score(MicroBatch(span=span, rows=rows))
    found = score(MicroBatch(span=span, rows=rows, packed=packed))
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= _TOLERANCES[compute_dtype]:
        attention = getattr(config, "_attn_implementation", "unknown")
        raise ValueError(
            f"policy.{feature}: with attention {attention!r}, {type(model).__name__} leaks across "
            f"sequences or loses tokens (scores differ by {difference:.2g} of the largest): use "
            "another attention, or policy.dynamic_batching"
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
