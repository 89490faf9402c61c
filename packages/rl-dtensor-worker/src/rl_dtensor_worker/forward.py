"""The forward passes: log-probabilities, logits and scores over micro-batches, and cached decoding.

Training, old and reference log-probabilities share one pass, so that they cannot differ.

FSDP all-gathers the output matrix only for the duration of the model's forward, so scores must be
computed inside it. For one forward the output layer is replaced by a function that computes scores
from hidden states, and the forward returns those instead of logits, which then exist in tiles only.
"""

from __future__ import annotations

import inspect
import logging
import math
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from rl_batched_data import ScoringOptions, TokenScores, target_scores
from rl_batched_data.logprobs_kernel import LogitTransform
from rl_interfaces.backend.generation import FullForwardDecoder, find_repeats
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from transformers import DynamicCache

from rl_dtensor_worker.layout import ParallelContext, media_of, token_columns_of
from rl_dtensor_worker.mixing import ModelError, model_errors
from rl_dtensor_worker.model.build import find_value_layer
from rl_dtensor_worker.parallel import collectives
from rl_dtensor_worker.parallel.structure import class_name
from rl_dtensor_worker.parallel.styles import sequence_dim
from rl_dtensor_worker.startup import TOLERANCES, random_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from rl_interfaces.backend.generation import Repeats
    from rl_interfaces.backend.steps import MicroBatch
    from transformers import PreTrainedConfig, PreTrainedModel

    from rl_dtensor_worker.config import EngineConfig
    from rl_dtensor_worker.layout import RowLayout
    from rl_dtensor_worker.parallel.styles import TensorParallel

logger = logging.getLogger(__name__)

# Names in transformers' configs of what is applied to logits after the output layer.
_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVISORS = ("logits_scaling",)
_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap")

# Names under which models of transformers take and return their cache.
_CACHES = ("past_key_values", "cache_params", "state")
# After the prefill, whose cache the first step reads; the next ones read what steps have written.
_DECODED_TOKENS = 4

# A range of logits in which all scales and soft caps in use differ measurably.
_PROBED_LOGITS = (-60.0, 60.0)
# Relative to the largest logit: rounding of a few float32 operations.
_PROBE_TOLERANCE = 1e-5
# Of cached decoding, relative to the largest logit. A decoder that is right differs by 1e-6 in
# float32, and one whose state updates are not those of the whole forward by 1e-4 and more.
_DECODER_TOLERANCES = TOLERANCES | {torch.float32: 5e-5}


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenHead:
    """How token scores are computed from the last hidden states; see `find_token_head`."""

    layer: nn.Linear | None
    """The output layer. None: the model's own forward makes all logits at once."""
    vocab_size: int
    """How many logits it makes, on all ranks together."""
    tensor_parallel: TensorParallel | None = None
    """The ranks that shard the vocabulary."""
    logit_scale: float = 1.0
    """The model's factor on the output layer's logits."""
    soft_cap: float | None = None
    """The model's soft cap on its logits."""
    is_fused: bool = False
    """Whether Liger computes log-probabilities, see `fused`."""

    def fused(self) -> TokenHead:
        """Return this head with log-probabilities by Liger.

        Raises:
            ValueError: It is not plain; the message says why.
        """
        ranks = 1 if self.tensor_parallel is None else self.tensor_parallel.group.size()
        layer = self.layer
        for applies, what in (
            (layer is None, "computes its logits itself"),
            (layer is not None and layer.bias is not None, "has a bias"),
            (self.soft_cap is not None, f"caps its logits at {self.soft_cap}"),
            (self.logit_scale <= 0, f"scales its logits by {self.logit_scale}"),
            (
                layer is not None and ranks > 1 and layer.weight.device.type != "cuda",
                f"has policy.dtensor_cfg.tensor_parallel_size={ranks} on a CPU",
            ),
            (
                self.vocab_size % ranks != 0,
                f"shards a vocabulary of {self.vocab_size} over "
                f"policy.dtensor_cfg.tensor_parallel_size={ranks} unevenly",
            ),
        ):
            if applies:
                raise ValueError(
                    f"policy.dtensor_cfg.fused_head=True: the model {what}, which Liger does not "
                    "support: set it to False"
                )
        return replace(self, is_fused=True)

    def target_scores(
        self,
        model: PreTrainedModel,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        *,
        temperature: float,
        top_k: int = 0,
        entropy: bool = False,
        arguments: Mapping[str, object],
        predictors: torch.Tensor | None = None,
    ) -> TokenScores:
        """Run the model's forward; return the scores of `targets`, each at its own position.

        Args:
            model: The model of this head.
            tokens: `[rows, seq]` int64.
            targets: `[rows, seq]` int64: the token to score at each position, usually the next one;
                with `predictors`, `[1, targets]`.
            temperature: Divides the logits, after scale and soft cap.
            top_k: How many of the largest logits to return.
            entropy: Whether to return the entropy.
            arguments: Further arguments of the forward, such as `position_ids`.
            predictors: See `RowLayout.predictors`.

        Returns:
            Fields of the shape of `targets`, and `[*targets.shape, top_k]`; see `TokenScores`.
        """
        options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "entropy": entropy}
        if self.layer is None:
            logits = model(input_ids=tokens, use_cache=False, **arguments).logits
            if predictors is not None:
                logits = logits.index_select(1, predictors)
            options.update(self._sharding())
            return target_scores(logits, targets, **options)

        def score(layer: nn.Linear, hidden: torch.Tensor) -> TokenScores:
            full = self._gather_hidden(hidden)
            if predictors is not None:
                full = full.index_select(1, predictors)
            # Liger has no top-k, which only teachers are asked for.
            options["fused"] = self.is_fused and top_k == 0
            return target_scores(full, targets, **self._options(layer), **options)

        with _output_layer_replaced(model, self.layer, score):
            return TokenScores(**model(input_ids=tokens, use_cache=False, **arguments))

    def _gather_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of all positions."""
        tp = self.tensor_parallel
        if tp is None or not tp.sequence_parallel:
            return hidden
        # `target_scores` all-reduces the gradient of its hidden states over the vocabulary shards.
        return collectives.gather_for_replicated_use(hidden, tp.group, sequence_dim(hidden))

    def _sharding(self) -> ScoringOptions:
        """Return which part of the vocabulary this rank has."""
        tp = self.tensor_parallel
        if tp is None:
            return ScoringOptions()
        return ScoringOptions(
            tp_group=tp.group, vocab_start=tp.vocabulary_range(self.vocab_size)[0]
        )

    def _options(self, layer: nn.Linear) -> ScoringOptions:
        options = self._sharding()
        options.update(
            logit_scale=self.logit_scale,
            soft_cap=self.soft_cap,
            # FSDP has gathered it for the forward; what is still a DTensor is the shard of a
            # tensor-parallel rank.
            output_matrix=_local(layer.weight),
            output_bias=None if layer.bias is None else _local(layer.bias),
        )
        return options


def _num_logits(model: PreTrainedModel) -> int:
    """Return how many logits a model's forward makes, on all ranks that share the vocabulary."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    return model.config.get_text_config().vocab_size if weight is None else weight.shape[0]


@torch.no_grad()
def find_token_head(
    model: PreTrainedModel, tensor_parallel: TensorParallel | None = None
) -> TokenHead:
    """Return the head of `model`, verified against its own forward. Collective.

    The forward runs once with known logits in place of the output layer's. If it changes them
    otherwise than its config says, or if the output layer is not a plain linear one, the head falls
    back to logits from the model's own forward, with a warning.
    """
    layer = model.get_output_embeddings()
    if type(layer) is not nn.Linear:
        reason = f"its output layer is a {type(layer).__name__}"
        return _own_head(model, tensor_parallel, reason)
    with nullcontext() if tensor_parallel is None else tensor_parallel.unsharded_sequences():
        probed = _probe_logits(model, layer)
    if probed is None:
        reason = "it does not call its output layer once per forward"
        return _own_head(model, tensor_parallel, reason)
    given, logits = probed
    # The second is for configs that name a scale which the model's forward does not apply.
    for scale, soft_cap in (_configured(model.config), (1.0, None)):
        transform = LogitTransform(scale=scale, soft_cap=soft_cap, temperature=1.0)
        if _close(logits, transform.apply_(given.clone())):
            return TokenHead(
                layer=layer,
                vocab_size=_num_logits(model),
                tensor_parallel=tensor_parallel,
                logit_scale=scale,
                soft_cap=soft_cap,
            )
    difference = _difference(logits, given) if logits.shape == given.shape else math.inf
    reason = (
        f"it changes its logits by {difference:.2g} of the largest, otherwise than its config says"
    )
    return _own_head(model, tensor_parallel, reason)


def _own_head(
    model: PreTrainedModel, tensor_parallel: TensorParallel | None, reason: str
) -> TokenHead:
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        logger.warning(
            "policy.model_name: %s computes all logits of a micro-batch at once, in memory that "
            "policy.train_micro_batch_size and policy.logprob_batch_size bound: %s",
            class_name(model),
            reason,
        )
    return TokenHead(layer=None, vocab_size=_num_logits(model), tensor_parallel=tensor_parallel)


def _probe_logits(
    model: PreTrainedModel, layer: nn.Linear
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return known logits and the forward's output for them; None if it ignores its layer."""
    device = torch.device(layer.weight.device)
    vocab_size = layer.weight.shape[0]
    tokens = torch.arange(8, device=device)[None] % vocab_size
    low, high = _PROBED_LOGITS
    # Large logits of both signs: near 0 a soft cap cannot be told from none.
    given = torch.linspace(low, high, tokens.numel() * vocab_size, device=device)
    given = given.view(*tokens.shape, vocab_size)
    calls: list[torch.Size] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(hidden.shape[:-1])
        return given.clone()

    with _forward_replaced(layer, forward):
        logits = model(input_ids=tokens, use_cache=False).logits
    return (given, logits) if calls == [tokens.shape] else None


def _configured(config: PreTrainedConfig) -> tuple[float, float | None]:
    """Return the logit scale and soft cap of a model's config."""
    text = config.get_text_config()

    def named(keys: tuple[str, ...]) -> list[float]:
        return [float(value) for key in keys if (value := getattr(text, key, None))]

    scale = 1.0
    for factor in named(_FACTORS):
        scale *= factor
    for divisor in named(_DIVISORS):
        scale /= divisor
    return scale, next(iter(named(_SOFT_CAPS)), None)


def _close(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    return logits.shape == expected.shape and _difference(logits, expected) <= _PROBE_TOLERANCE


def _difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    return float((logits.float() - expected).abs().max() / expected.abs().max())


@contextmanager
def _output_layer_replaced(
    model: PreTrainedModel,
    layer: nn.Linear,
    score: Callable[[nn.Linear, torch.Tensor], TokenScores],
) -> Generator[None, None, None]:
    """Replace `layer` by `score`, and the model's output by the fields of its result."""
    found: list[TokenScores] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        found.append(score(layer, hidden))
        # The rest of the forward expects logits; a vocabulary of one costs nothing.
        return torch.zeros((*found[-1].logprobs.shape, 1), device=hidden.device)

    # Before FSDP's hook, which registers the backward pass on the output's tensors.
    hook = model.register_forward_hook(lambda *_: _tensors_of(found.pop()), prepend=True)
    try:
        with _forward_replaced(layer, forward):
            yield
    finally:
        hook.remove()


def _tensors_of(scores: TokenScores) -> dict[str, torch.Tensor | None]:
    """Return the fields in a container that FSDP traverses, cloned where they need gradients."""
    values = {field.name: getattr(scores, field.name) for field in fields(scores)}
    return {
        name: value.clone() if value is not None and value.requires_grad else value
        for name, value in values.items()
    }


@contextmanager
def _forward_replaced(
    layer: nn.Linear, forward: Callable[[torch.Tensor], torch.Tensor]
) -> Generator[None, None, None]:
    own = layer.forward
    layer.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        layer.forward = own  # type: ignore[method-assign]


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@contextmanager
def output_of_layer(model: PreTrainedModel, layer: nn.Linear) -> Generator[None, None, None]:
    """Make the output of `layer` the model's output inside."""
    found: list[torch.Tensor] = []

    def keep(_layer: nn.Module, _arguments: object, output: torch.Tensor) -> None:
        found.append(output)

    hooks = [
        layer.register_forward_hook(keep),
        # FSDP registers the backward pass on the output's tensors, which must not be views.
        model.register_forward_hook(lambda *_: found.pop().clone(), prepend=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """A model's forward over micro-batches of any layout.

    All results are in the caller's rows, `[batch, seq, ...]`.
    """

    model: PreTrainedModel
    head: TokenHead
    width_multiple: int
    """Padded rows are padded further to a multiple of this, inside."""
    parallel: ParallelContext = field(default_factory=ParallelContext)
    """The ranks that run one forward together."""

    def logprobs(self, micro_batch: MicroBatch, *, temperature: float = 1.0) -> torch.Tensor:
        """Return each token's log-probability, `[batch, seq]` float32; 0 at 0 and at padding."""
        layout, scores = self._scores(micro_batch, temperature=temperature)
        return layout.targets_to_rows(scores.logprobs)

    def topk_logits(self, micro_batch: MicroBatch, k: int) -> dict[str, torch.Tensor]:
        """Return `topk_logits` and `topk_indices`, `[batch, seq, k]`; 0 at padding.

        Position `t` has the logits that predict token `t + 1`.
        """
        layout, scores = self._scores(micro_batch, top_k=k)
        assert scores.top_k_logits is not None
        assert scores.top_k_indices is not None
        return {
            "topk_logits": layout.to_rows(scores.top_k_logits),
            "topk_indices": layout.to_rows(scores.top_k_indices),
        }

    def logits(
        self, micro_batch: MicroBatch, *, temperature: float = 1.0, sharded: bool = False
    ) -> torch.Tensor:
        """Return all logits, `[batch, seq, vocab]` float32: `logits[:, t]` predict `t + 1`.

        Args:
            micro_batch: The rows.
            temperature: Divides the logits.
            sharded: Return tensor-parallel logits as a `DTensor` sharded along the vocabulary, of
                which this rank has made its shard, instead of gathering them.
        """
        layout = self._lay_out(micro_batch)
        with self.parallel.mixing.using(layout.sequences):
            output = self.model(input_ids=layout.tokens, use_cache=False, **layout.arguments)
        # A user's plan may leave them a DTensor. Rows are restored along other dims than the last.
        logits = layout.to_rows(_local(output.logits), masked=False)
        tp = self.parallel.tensor_parallel
        if not sharded:
            logits = self.gather_logits(logits)
        # After the gather: float32 would double the bytes of a 16-bit vocabulary.
        logits = logits.float()
        logits = logits if temperature == 1.0 else logits / temperature
        if tp is None or not sharded:
            return logits
        # Given, as parts may be unlike: torch would multiply this one by the number of ranks.
        shape = torch.Size([*logits.shape[:-1], _num_logits(self.model)])
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            logits, tp.mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride
        )

    def full_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of right-padded `[rows, seq]`, `[rows, seq, vocab]`: no temperature."""
        return self.gather_logits(self.model(input_ids=tokens, use_cache=False).logits)

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits of the full vocabulary from those of the model's forward."""
        tp = self.parallel.tensor_parallel
        return logits if tp is None else tp.gather_logits(logits, _num_logits(self.model))

    def _lay_out(self, micro_batch: MicroBatch) -> RowLayout:
        return self.parallel.lay_out(self.model, micro_batch, self.width_multiple)

    def _scores(
        self, micro_batch: MicroBatch, *, temperature: float = 1.0, top_k: int = 0
    ) -> tuple[RowLayout, TokenScores]:
        layout = self._lay_out(micro_batch)
        # The largest logits are those of each position, not of each target.
        by_position = top_k > 0
        with self.parallel.mixing.using(layout.sequences):
            scores = self.head.target_scores(
                self.model,
                layout.tokens,
                layout.tokens if by_position else layout.targets,
                temperature=temperature,
                top_k=top_k,
                arguments=layout.arguments,
                predictors=None if by_position else layout.predictors,
            )
        return layout, scores


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueForward:
    """A reward or value model's forward over micro-batches of any layout.

    Scores are the score layer's output at every token: a sequence classifier's own pooling of each
    row's last token supports neither explicit lengths nor packing.
    """

    model: PreTrainedModel
    layer: nn.Linear
    is_reward: bool
    """Whether a row has one score, at its last token."""
    width_multiple: int
    """Padded rows are padded further to a multiple of this, inside."""
    parallel: ParallelContext = field(default_factory=ParallelContext)
    """The ranks that run one forward together."""

    def values(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the score of each token, `[batch, seq]` float32; padding is 0."""
        layout = self.parallel.lay_out(self.model, micro_batch, self.width_multiple)
        with (
            output_of_layer(self.model, self.layer),
            self.parallel.mixing.using(layout.sequences),
        ):
            values = self.model(input_ids=layout.tokens, use_cache=False, **layout.arguments)
        return layout.to_rows(values.float().squeeze(-1))

    def logits(
        self, micro_batch: MicroBatch, *, temperature: float = 1.0, sharded: bool = False
    ) -> torch.Tensor:
        """Return scores, which a loss gets in place of logits; never sharded, nor divided.

        Returns:
            Float32, `[batch]` of a reward model, `[batch, seq]` of a value model.
        """
        values = self.values(micro_batch)
        if not self.is_reward:
            return values
        last = micro_batch.rows["input_lengths"][:, None] - 1
        return values.gather(1, last).squeeze(1)


def forward_of_head(
    model: PreTrainedModel,
    config: EngineConfig,
    *,
    parallel: ParallelContext,
    pad_token_id: int | None,
) -> Forward | ValueForward:
    """Return the forward pass of a model with the head that its config asks for. Collective."""
    if config.head == "language_model":
        head = find_token_head(model, parallel.tensor_parallel)
        return Forward(
            model=model,
            head=head.fused() if config.fused_head else head,
            width_multiple=config.width_multiple,
            parallel=parallel,
        )
    return ValueForward(
        model=model,
        layer=find_value_layer(model, pad_token_id=pad_token_id),
        is_reward=config.head == "reward",
        width_multiple=config.width_multiple,
        parallel=parallel,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """A `ForwardOutput`: each method runs the model's forward."""

    forward: Forward | ValueForward
    micro_batch: MicroBatch

    def logprobs(self, *, temperature: float = 1.0) -> torch.Tensor:
        """See `ForwardOutput.logprobs`."""
        return self._of_tokens.logprobs(self.micro_batch, temperature=temperature)

    def logits(self, *, temperature: float = 1.0, sharded: bool = False) -> torch.Tensor:
        """See `ForwardOutput.logits`; a reward or value model has scores in their place."""
        return self.forward.logits(self.micro_batch, temperature=temperature, sharded=sharded)

    def topk_logits(self, k: int) -> dict[str, torch.Tensor]:
        """See `ForwardOutput.topk_logits`."""
        return self._of_tokens.topk_logits(self.micro_batch, k)

    @property
    def _of_tokens(self) -> Forward:
        assert isinstance(self.forward, Forward), "EngineInfo.lacks has refused the call"
        return self.forward


class CachedForward:
    """A `rl_interfaces.backend.generation.Decoder` of a model of transformers.

    Rows with the same prompt, as the samples of a group have, share one prefill, whose cache is
    then copied for each of them.

    Args:
        forward: Of a model in eval mode, unsharded except for tensor parallelism.
        rows: The prompts' batch; media are read in the prefill, and then cached.

    Raises:
        ValueError: The model does not take a kind of media in the batch.
    """

    def __init__(self, forward: Forward, rows: Mapping[str, object]) -> None:
        self._forward = forward
        self._media = media_of(forward.model, rows)
        self._columns = token_columns_of(forward.model, rows)
        self._cache_name = _cache_argument(forward.model)
        # The usual cache is filled in place; other ones are made in a model's first forward.
        self._is_usual = self._cache_name == "past_key_values"
        self._cache: object = None
        # The rows that are decoded on, where a cache of another kind keeps all.
        self._kept: torch.Tensor | None = None
        if self._is_usual:
            self._cache = DynamicCache(config=forward.model.config)
        # Decoding reads the last position alone, and all of a prompt's logits would be large.
        self._last_only = {"logits_to_keep": 1} if _keeps_last_logits(forward.model) else {}

    def prefill(self, prompts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """See `Decoder.prefill`."""
        tokens, self._mask, self._positions = left_pad(prompts, lengths)
        if not self._media:
            repeats = find_repeats(prompts, lengths) if self._is_usual else None
            return self._logits(tokens) if repeats is None else self._prefill_once(tokens, repeats)
        device = prompts.device
        seen = {name: tensor.to(device) for name, tensor in self._media.items()}
        for name, column in self._columns.items():
            seen[name], _, _ = left_pad(column.to(device), lengths)
        # Tokens of an image may share a position, or have several; the model itself knows.
        prepare: Any = self._forward.model._prepare_position_ids_for_generation
        self._positions = prepare(tokens, {"attention_mask": self._mask, **seen})
        return self._logits(tokens, **seen)

    def _prefill_once(self, tokens: torch.Tensor, repeats: Repeats) -> torch.Tensor:
        """Run the model on the first row of each prompt, and give all rows its cache and logits."""
        assert isinstance(self._cache, DynamicCache)
        first, mask, positions = repeats.first, self._mask, self._positions
        self._mask, self._positions = mask[first], positions[first]
        logits = self._logits(tokens[first])
        self._cache.reorder_cache(repeats.copies)  # pyright: ignore[reportArgumentType] # int64
        self._mask, self._positions = mask, positions
        return logits[repeats.copies]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `Decoder.step`."""
        self._positions = self._positions[..., -1:] + 1
        # Ended rows get a 1 as well: their tokens are never read.
        self._mask = F.pad(self._mask, (0, 1), value=1)
        if self._kept is None:
            return self._logits(tokens[:, None])
        all_tokens = tokens.new_zeros(len(self._mask)).index_copy(0, self._kept, tokens)
        return self._logits(all_tokens[:, None])[self._kept]

    def keep(self, rows: torch.Tensor) -> None:
        """See `Decoder.keep`."""
        if not isinstance(self._cache, DynamicCache):
            self._kept = rows if self._kept is None else self._kept[rows]
            return
        self._cache.reorder_cache(rows)  # pyright: ignore[reportArgumentType] # int64
        self._mask = self._mask[rows]
        self._positions = self._positions.index_select(-2, rows)

    def _logits(self, tokens: torch.Tensor, **media: torch.Tensor) -> torch.Tensor:
        output = self._forward.model(
            input_ids=tokens,
            attention_mask=self._mask,
            position_ids=self._positions,
            use_cache=True,
            **{self._cache_name: self._cache},
            **self._last_only,
            **media,
        )
        if not self._is_usual:
            self._cache = output[self._cache_name]
        return self._forward.gather_logits(output.logits[:, -1])


def _cache_argument(model: PreTrainedModel) -> str:
    """Return the name under which the model's forward takes and returns its cache."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in _CACHES if name in taken), _CACHES[0])


class Decoding:
    """Opens decoders of a model: with a cache, if that gives the model's own logits.

    Whether it does cannot be read from a config. Some models take no cache, some read the padding
    on the left of a shorter prompt in a recurrent state or in compressed keys. So the first use
    decodes random prompts, one of them twice, with and without a cache.
    """

    def __init__(self, forward: Forward, *, compute_dtype: torch.dtype) -> None:
        self._forward = forward
        self._tolerance = _DECODER_TOLERANCES[compute_dtype]
        self._cached: bool | None = None

    def open(self, rows: Mapping[str, object]) -> CachedForward | FullForwardDecoder:
        """Return a decoder for `rows`; the model is unsharded except for tensor parallelism.

        Raises:
            ValueError: The rows have media, and the model needs a decoder without a cache.
        """
        if self._cached is None:
            self._cached = self._is_exact()
        if self._cached:
            return CachedForward(self._forward, rows)
        if media := media_of(self._forward.model, rows):
            raise ValueError(
                f"generate: {class_name(self._forward.model)} decodes without a cache, which "
                f"does not support the media {sorted(media)} of the batch"
            )
        return FullForwardDecoder(self._forward.full_logits)

    @torch.no_grad()
    def _is_exact(self) -> bool:
        """Return whether decoding with a cache gives the logits of full forwards; warn if not."""
        try:
            with model_errors(self._forward.model):
                difference = _decoder_difference(self._forward)
        except ModelError as error:
            # Many of transformers' classes expect a cache of their own, or none.
            reason = f"raises {error}"
        else:
            # `<=`, so that NaN is a difference.
            if difference <= self._tolerance:
                return True
            reason = f"gives other logits than its full forward, by {difference:.2g} of the largest"
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            logger.warning(
                "generate: with a cache and prompts padded on the left, %s %s: it generates "
                "without a cache, which is slower. An inference engine (policy.generation.backend) "
                "is not affected",
                class_name(self._forward.model),
                reason,
            )
        return False


def _decoder_difference(forward: Forward) -> float:
    """Return the largest difference of cached decoding from full forwards, relative."""
    device = next(forward.model.parameters()).device
    rows = random_rows(forward.model.config.get_text_config().vocab_size)
    # The shortest prompt twice, as rows of a group share a prefill.
    rows = rows.select_indices(torch.tensor([0, 2, 2]))
    prompts, lengths = rows["input_ids"].to(device), rows["input_lengths"].to(device)

    def decode(decoder: CachedForward | FullForwardDecoder) -> torch.Tensor:
        logits = [decoder.prefill(prompts, lengths)]
        logits += [decoder.step(prompts[:, column]) for column in range(_DECODED_TOKENS - 1)]
        # One row ends, and the others go on.
        decoder.keep(torch.tensor([0, 2], device=device))
        logits.append(decoder.step(prompts[::2, -1]))
        return torch.cat(logits).float()

    # One after the other: neither's memory is there while the other decodes.
    expected = decode(FullForwardDecoder(forward.full_logits))
    found = decode(CachedForward(forward, {}))
    return float((found - expected).abs().max() / expected.abs().max())


def left_pad(
    prompts: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Move each right-padded prompt to the right edge, so that all continue in one column.

    Returns:
        The tokens, the attention mask and the position ids, each int64 `[rows, longest prompt]`.
    """
    longest = int(lengths.max())
    column = torch.arange(longest, device=prompts.device)[None, :]
    position = column - (longest - lengths[:, None])
    mask = (position >= 0).long()
    # Padding reads a row's first token, which the mask turns into 0.
    position = position.clamp(min=0)
    return prompts.gather(1, position) * mask, mask, position


def _keeps_last_logits(model: PreTrainedModel) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters
