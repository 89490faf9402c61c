"""What the start of a worker finds out about a model by running it on a few random rows.

What cannot be read from a config: whether a model is causal, whether it computes the same in
training as in scoring, and how it has to be run for a layout to give the scores and the gradients
of padded rows with full sequences.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from rl_batched_data import SlicedDataDict
from rl_interfaces.backend.steps import MicroBatch
from torch.linalg import vector_norm

from rl_dtensor_worker.layout import SHARING
from rl_dtensor_worker.mixing import (
    ModelError,
    Way,
    few_choices,
    model_errors,
    run_probe,
    short_windows,
    take_attention,
    ways_of,
)
from rl_dtensor_worker.parallel.fsdp import local_tensor
from rl_dtensor_worker.parallel.sequence import shard_in_layers
from rl_dtensor_worker.parallel.structure import class_name
from rl_dtensor_worker.parallel.styles import SequenceScope

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

    from transformers import PreTrainedModel

    from rl_dtensor_worker.layout import ParallelContext
    from rl_dtensor_worker.parallel.styles import TensorParallel

logger = logging.getLogger(__name__)

# Bounds on rounding, relative to the largest log-probability. Attention that leaks across sequences
# changes log-probabilities by about their own magnitude.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Of a parameter's gradient, relative to its norm. One that lacks a sum over ranks is off by half of
# that and more; float32 differs by 1e-5, 16 bits by a few percent.
_GRADIENT_TOLERANCES = {torch.float32: 1e-2, torch.float16: 0.25, torch.bfloat16: 0.25}
# Relative to the largest norm of a parameter's gradient: below, a gradient is rounding alone.
_SMALL_GRADIENT = 1e-2
# Unequal lengths: a token that reads beyond its row's boundary gets another score.
_LENGTHS = (11, 7, 2)
# The keys whose micro-batches are one packed row.
_PACKED_FEATURES = ("sequence_packing", "dtensor_cfg.context_parallel_size")
# Of the two longer ones, where sharing is checked.
_COMMON_START = 5


@torch.no_grad()
def check_causality(
    model: PreTrainedModel,
    logprobs: Callable[[MicroBatch], torch.Tensor],
    *,
    parallel: ParallelContext,
    compute_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise if a token's log-probability depends on what stands after it. Collective.

    Two random rows that differ in their last token must have the same log-probabilities before it,
    and a row alone those that it has with padding after it.

    Args:
        model: The model.
        logprobs: Returns the log-probability of each token, `[batch, seq]`.
        parallel: The ranks that run one forward together.
        compute_dtype: The model's compute dtype.
        device: Where it is.

    Raises:
        ValueError: It does; the message names the class and the difference.
    """
    vocab_size = model.config.get_text_config().vocab_size
    random = random_rows(vocab_size)
    tokens = random["input_ids"][:1].repeat(2, 1)
    tokens[1, -1] = (tokens[0, -1] + 1) % vocab_size
    twice = SlicedDataDict({"input_ids": tokens, "input_lengths": random["input_lengths"][[0, 0]]})
    width = int(random["input_lengths"][1])
    alone = random.select_indices(torch.tensor([1]))
    alone["input_ids"] = alone["input_ids"][:, :width]

    def scores_of(rows: SlicedDataDict) -> torch.Tensor:
        return logprobs(MicroBatch(span=(0, rows.size), rows=rows.to(device)))

    with parallel.unsharded_sequences():
        one, other = scores_of(twice)[:, :-1]
        padded, full = scores_of(random)[1, :width], scores_of(alone)[0]
    _check_finite(full, model, compute_dtype)
    for found, expected, what in (
        (other, one, "another last token changes the log-probabilities before it"),
        (padded, full, "padding changes the log-probabilities before it"),
    ):
        difference = float((found - expected).abs().max() / expected.abs().max())
        # `not <=` rather than `>`, so that NaN fails.
        if not difference <= TOLERANCES[compute_dtype]:
            raise ValueError(
                f"policy.model_name: {class_name(model)} is not causal: {what} by "
                f"{difference:.2g} of the largest"
            )


def _check_finite(scores: torch.Tensor, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Raise if a model's scores are not finite, of which no comparison says anything."""
    if not scores.isfinite().all():
        raise ValueError(
            f"policy.model_name: {class_name(model)} gives scores that are not finite in "
            f"{dtype}, though its weights are: try another policy.precision"
        )


@torch.no_grad()
def check_modes(
    model: PreTrainedModel,
    mode: Callable[[bool], AbstractContextManager[None]],
    *,
    compute_dtype: torch.dtype,
) -> None:
    """Raise if a model computes otherwise in training mode than when it scores. Collective.

    Args:
        model: The model, with its dropout off.
        mode: Opens a context in training mode, or in eval mode.
        compute_dtype: The model's compute dtype.

    Raises:
        ValueError: It does; the message names the class and the difference.
    """
    found: list[torch.Tensor] = []
    for training in (True, False):
        with mode(training):
            found.append(run_probe(model))
    trained, scored = found
    _check_finite(scored, model, compute_dtype)
    difference = float((trained - scored).abs().max() / scored.abs().max())
    if not difference <= TOLERANCES[compute_dtype]:
        raise ValueError(
            f"policy.model_name: {class_name(model)} computes otherwise in training than when it "
            f"scores, by {difference:.2g} of the largest logit, so that importance ratios would "
            "not start at 1: policy.dtensor_cfg.model_dropout=true lets it"
        )


def keep_apart(
    model: PreTrainedModel,
    check: Callable[[], None],
    parallel: ParallelContext,
    compute_dtype: torch.dtype,
) -> None:
    """Find out how a model has to be run for `check` to pass. Collective.

    That is where sequence parallelism shards, and which blocks are run on unpacked rows.

    Raises:
        ValueError: It passes in no way; what it says where the model's own blocks take the layout.
    """
    with few_choices(model):
        scope, way = _find_way(model, check, parallel, compute_dtype)
    _report(model, scope, way)


def _find_way(
    model: PreTrainedModel,
    check: Callable[[], None],
    parallel: ParallelContext,
    compute_dtype: torch.dtype,
) -> tuple[SequenceScope, Way]:
    """Return the first way of running a model for which `check` passes, see `keep_apart`."""
    mixing, first, own = parallel.mixing, None, model.config._attn_implementation
    with parallel.unsharded_sequences():
        tolerance = TOLERANCES[compute_dtype]
        mixing.has_windows_in_masks = take_attention(model, tolerance=tolerance)
    mixing.attention = model.config._attn_implementation
    for scope in _scopes(model, parallel.tensor_parallel, lambda: mixing.choose(model, Way(), own)):
        for way in ways_of(model, parallel.unsharded_sequences):
            mixing.choose(model, way, own)
            try:
                check()
            except ValueError as error:
                first = first or error
            else:
                return scope, way
    assert first is not None
    raise first


def _scopes(
    model: PreTrainedModel, tp: TensorParallel | None, restore: Callable[[], None]
) -> Generator[SequenceScope, None, None]:
    """Set one scope of sequence parallelism after the other, the one that shards most first.

    Args:
        model: The model.
        tp: The ranks that shard each layer.
        restore: Has the model run its blocks as they are.
    """
    yield SequenceScope.MODEL
    if tp is None or not tp.shards_sequences:
        return
    restore()
    longest = shard_in_layers(model, tp)
    for tp.scope, needed in ((SequenceScope.LAYERS, 1), (SequenceScope.BETWEEN_LAYERS, 2)):
        if longest >= needed:
            yield tp.scope


def _report(model: PreTrainedModel, scope: SequenceScope, way: Way) -> None:
    """Log what a model that does not take a layout as it stands costs beside others."""
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    if scope is not SequenceScope.MODEL:
        logger.warning(
            "policy.dtensor_cfg.sequence_parallel=True shards %s of %s, whose code needs full "
            "sequences elsewhere: activations are full there, on each rank",
            scope.value,
            class_name(model),
        )
    if way.keeps_mask:
        logger.warning(
            "policy.sequence_packing.enabled=True: %s adds a bias of positions to its mask, which "
            "takes memory for all pairs of tokens of a packed micro-batch "
            "(policy.sequence_packing.train_mb_tokens and logprob_mb_tokens)",
            class_name(model),
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
    config = model.config
    batch = random_rows(config.get_text_config().vocab_size)
    packs = feature.startswith(_PACKED_FEATURES)
    packed = parallel.concatenation().of(batch).to(device) if packs else None
    shared = None
    if feature == SHARING:
        batch["input_ids"][1, :_COMMON_START] = batch["input_ids"][0, :_COMMON_START]
        shared = parallel.concatenation().share(batch)
        assert shared is not None, "the rows have enough in common"
        shared = shared.to(device)
    rows, span = batch.to(device), (0, batch.size)
    with short_windows(model) if parallel.mixing.has_windows_in_masks else nullcontext():
        # The oracle: padded rows with full sequences, which every model supports.
        with parallel.unsharded_sequences():
            expected = score(MicroBatch(span=span, rows=rows))
        try:
            with model_errors(model):
                found = score(MicroBatch(span=span, rows=rows, packed=packed, shared=shared))
        except ModelError as error:
            raise ValueError(
                f"policy.{feature}: {class_name(model)} does not run so: {error}. Leave the key "
                "out (policy.dynamic_batching takes padded rows)"
            ) from error
    difference = float((found - expected).abs().max() / expected.abs().max())
    # `not <=` rather than `>`, so that NaN fails.
    if not difference <= TOLERANCES[compute_dtype]:
        attention = getattr(config, "_attn_implementation", "unknown")
        raise ValueError(
            f"policy.{feature}: with attention {attention!r}, {class_name(model)} leaks across "
            f"sequences or loses tokens (scores differ by {difference:.2g} of the largest): use "
            "another policy.dtensor_cfg.attn_implementation, or leave it out "
            "(policy.dynamic_batching takes padded rows)"
        )


def check_gradients(
    model: PreTrainedModel,
    score: Callable[[MicroBatch], torch.Tensor],
    *,
    parallel: ParallelContext,
    compute_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise unless sequence parallelism gives the gradients of full sequences. Collective.

    A parameter that sees the tokens of one rank has a partial gradient, which has to be summed over
    the ranks; scores are right all the same where it is not. Two backward passes on three random
    rows, after which no gradient is left. At most the gradients are there twice, which is less than
    what an optimizer keeps.

    Args:
        model: The model, in eval mode.
        score: Returns the score of each token, `[batch, seq]`.
        parallel: The ranks that run one forward together.
        compute_dtype: The model's compute dtype.
        device: Where it is.

    Raises:
        ValueError: They differ; the message names the class, the parameter and the difference.
    """
    batch = random_rows(model.config.get_text_config().vocab_size)
    rows = MicroBatch(span=(0, batch.size), rows=batch.to(device))
    with parallel.unsharded_sequences():
        expected = _gradients_of(model, score, rows)
    try:
        with model_errors(model):
            found = _gradients_of(model, score, rows)
    except ModelError as error:
        raise ValueError(
            f"policy.dtensor_cfg.sequence_parallel=True: {class_name(model)} does not run so: "
            f"{error}. Leave the key out"
        ) from error
    norms_of_shards = [
        torch.stack([vector_norm(each, dtype=torch.float64) for each in (found[name] - own, own)])
        for name, own in expected.items()
    ]
    # A rank may have a shard of a parameter, or nothing of it: all decide alike.
    totals = torch.stack(norms_of_shards).square().to(device)
    dist.all_reduce(totals)
    differences, norms = totals.sqrt().unbind(1)
    relative = differences / norms.clamp(min=_SMALL_GRADIENT * float(norms.max()))
    worst = int(relative.nan_to_num(torch.inf).argmax())
    # `not <=` rather than `>`, so that NaN fails.
    if not float(relative[worst]) <= _GRADIENT_TOLERANCES[compute_dtype]:
        raise ValueError(
            f"policy.dtensor_cfg.sequence_parallel=True: {class_name(model)} gets a wrong gradient "
            f"of {list(expected)[worst]} (by {float(relative[worst]):.2g} of its norm), though its "
            "scores are right. Leave the key out"
        )


def _gradients_of(
    model: PreTrainedModel, score: Callable[[MicroBatch], torch.Tensor], rows: MicroBatch
) -> dict[str, torch.Tensor]:
    """Return this rank's shard of each trained parameter's gradient of a weighted sum of scores."""
    with torch.enable_grad():
        scores = score(rows)
        weights = torch.linspace(-1, 1, scores.numel(), device=scores.device)
        (scores * weights.view_as(scores)).sum().backward()
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[name] = local_tensor(gradient)
    model.zero_grad(set_to_none=True)
    return found


def random_rows(vocab_size: int) -> SlicedDataDict:
    """Return three rows of random tokens of unequal lengths, on the CPU, to probe a model with."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(_LENGTHS), max(_LENGTHS))
    return SlicedDataDict(
        {
            "input_ids": torch.randint(vocab_size, shape, generator=generator),
            "input_lengths": torch.tensor(_LENGTHS),
        }
    )
