"""Linear attention by the gated delta rule (arXiv:2412.06464), as Qwen3-Next has it.

Megatron-core's own needs a package of kernels for GPUs, and supports neither packed sequences nor
context parallelism. This one is of torch's operators, on every device. Heads are sharded over
tensor-parallel ranks. Packed sequences are unpacked into padded rows, those of similar length
together; under context parallelism every rank mixes full sequences, and goes on with its own
tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

from rl_megatron_worker.layout import PackedRows
from rl_megatron_worker.model.layers import SumGradient

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict
    from megatron.core.process_groups_config import ProcessGroupCollection

    from rl_megatron_worker.attention import KeyValueCache
    from rl_megatron_worker.model.config import DecoderConfig

_CHUNK_SIZE = 64
_NORM_EPSILON = 1e-6
_SHARDED = ("conv_weight", "dt_bias", "A_log")


class DeltaInputs(NamedTuple):
    """What the delta rule takes of each token; float32."""

    query: torch.Tensor
    """`[rows, heads, width, key_size]`."""
    key: torch.Tensor
    """Like `query`, of length 1."""
    value: torch.Tensor
    """`[rows, heads, width, value_size]`."""
    log_decay: torch.Tensor
    """`[rows, heads, width]`, at most 0: the log of the share of the state that is kept."""
    beta: torch.Tensor
    """`[rows, heads, width]`, 0 to 1: the share of what the key stood for that is replaced."""


def gated_delta_rule(
    inputs: DeltaInputs, state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs `[rows, heads, width, value_size]`, and the state after the last token.

    The state maps keys to values. A token with key `k` and value `v` makes of it
    `decay * state + k (beta * (v - k @ decay * state))`; its output is `query @ state`. A chunk of
    tokens is computed at once: what each of them writes solves a triangular system
    (arXiv:2412.06464, section 3.3).

    Args:
        inputs: Of the tokens.
        state: `[rows, heads, key_size, value_size]` before the first token; zeros when None.
    """
    width, value_size = inputs.value.shape[2:]
    size = min(_CHUNK_SIZE, width)
    query, key, value, log_decay, beta = (_chunks(each, size) for each in inputs)
    total = log_decay.cumsum(-1)
    # From each token of a chunk (last dim) to each one after it.
    decay = total[..., :, None] - total[..., None, :]
    is_later = torch.ones(size, size, dtype=torch.bool, device=decay.device).triu(1)
    decay = decay.masked_fill(is_later, float("-inf")).exp()
    system = beta[..., None] * (key @ key.mT) * decay
    known = beta[..., None] * torch.cat([value, total.exp()[..., None] * key], -1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    written, replaced = solved.split([value_size, key.shape[-1]], -1)
    within = (query @ key.mT) * decay
    query = query * total.exp()[..., None]
    last = total[..., -1:]
    key = key * (last - total).exp()[..., None]
    before = state
    if before is None:
        before = value.new_zeros(*value.shape[:2], key.shape[-1], value_size)
    outputs: list[torch.Tensor] = []
    for chunk in range(value.shape[2]):
        new = written[:, :, chunk] - replaced[:, :, chunk] @ before
        outputs.append(query[:, :, chunk] @ before + within[:, :, chunk] @ new)
        kept = last[:, :, chunk, :, None].exp() * before
        before = kept + key[:, :, chunk].mT @ new
    return torch.stack(outputs, 2).flatten(2, 3)[:, :, :width], before


def _chunks(values: torch.Tensor, size: int) -> torch.Tensor:
    """Return `[rows, heads, width, ...]` as `[rows, heads, chunks, size, ...]`.

    Tokens that complete the last chunk are zeros, which leave the state as it is.
    """
    missing = -values.shape[2] % size
    padding = (0, 0, 0, missing) if values.ndim == 4 else (0, missing)
    return F.pad(values, padding).unflatten(2, (-1, size))


class GatedDeltaNet(MegatronModule):
    """The `self_attention` of a layer with linear attention.

    The rows of `in_proj`, and the channels of `conv_weight`, are those of each key's head together:
    query, key, the values of its heads, their gates, rates and decays.

    Args:
        config: Megatron-core's config of the model.
        layer_number: Counts from 1, over all pipeline stages.
        pg_collection: Of the tensor-parallel group.
        unused: Arguments of other attention modules.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **unused: object,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        num_ranks = config.tensor_model_parallel_size
        # Annotated as optional: other models have none.
        num_keys = cast("int", config.linear_num_key_heads)
        num_values = cast("int", config.linear_num_value_heads)
        key_size = cast("int", config.linear_key_head_dim)
        value_size = cast("int", config.linear_value_head_dim)
        kernel = cast("int", config.linear_conv_kernel_dim)
        self._num_keys = num_keys // num_ranks
        self._key_size, self._value_size = key_size, value_size
        self._values_per_key = num_values // num_keys
        mixed_size = 2 * key_size + self._values_per_key * value_size
        # Of each key's head: what is mixed, gates, and two rates of each value's head.
        self._sizes = [mixed_size, self._values_per_key * value_size, 2 * self._values_per_key]
        linear: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "is_expert": False,
            "tp_group": self.tp_group,
        }
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            num_keys * sum(self._sizes),
            gather_output=False,
            **linear,
        )
        self.out_proj = RowParallelLinear(
            num_values * value_size,
            config.hidden_size,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )
        self.conv_weight = _parameter(config, self._num_keys * mixed_size, 1, kernel)
        self.dt_bias = _parameter(config, num_values // num_ranks)
        self.A_log = _parameter(config, num_values // num_ranks)
        for name in _SHARDED:
            set_tensor_model_parallel_attributes(
                getattr(self, name), is_parallel=True, dim=0, stride=1
            )
        self.norm_weight = _parameter(config, value_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *args: object,
        packed_seq_params: PackedRows,
        **unused: object,
    ) -> tuple[torch.Tensor, None]:
        """Return the output of each token, `[tokens, 1, hidden_size]`, and no bias.

        Args:
            hidden_states: `[tokens, 1, hidden_size]`, local tokens.
            args: Arguments of other attention modules, as `unused`.
            packed_seq_params: The sequences.
            unused: See `args`.
        """
        projected = self.in_proj(hidden_states)[0].squeeze(1).unflatten(-1, (self._num_keys, -1))
        mixed, gate, rates = projected.split(self._sizes, -1)
        output = self._mix(packed_seq_params, torch.cat([mixed, rates], -1))
        gate = gate.reshape(output.shape)
        return self.out_proj(self._normalise(output, gate).flatten(1)[:, None])[0], None

    def _mix(self, rows: PackedRows, states: torch.Tensor) -> torch.Tensor:
        """Return the outputs of local tokens, `[tokens, value heads / tp, value_size]`.

        Args:
            rows: The sequences.
            states: `[tokens, key heads / tp, size]`: what is mixed, and rates.
        """
        cache = rows.cache
        if cache is not None and self.layer_number in cache.layers:
            return self._step(cache, states)
        if cache is not None:
            return self._prefill(cache, states)
        if rows.context_group is not None:
            states = rows.gather_for_attention(states).index_select(0, rows.shards.gathered)
        outputs = [
            gated_delta_rule(self._inputs(self._convolve(group), group))[0].transpose(1, 2)
            for group in rows.full_rows.gather(states)
        ]
        flat = torch.cat([each.flatten(0, 1) for each in outputs])
        output = flat.index_select(0, rows.full_sequences.places).type_as(states)
        return rows.shard(output)

    def _prefill(self, cache: KeyValueCache, states: torch.Tensor) -> torch.Tensor:
        """Return `_mix` of packed prompts, and keep what the tokens after them need."""
        rows = cache.prompts.unpack(states[None])
        ones = torch.ones_like(states[None, :, 0, 0], dtype=torch.int64)
        is_token = cache.prompts.unpack(ones)
        inputs = self._inputs(self._convolve(rows), rows)
        # The tokens behind a prompt leave the state as it is.
        inputs = inputs._replace(
            log_decay=inputs.log_decay * is_token[:, None], beta=inputs.beta * is_token[:, None]
        )
        output, state = gated_delta_rule(inputs)
        before = self.conv_weight.shape[-1] - 1
        channels = F.pad(self._channels(rows), (before, 0))
        places = is_token.sum(1)[:, None] + torch.arange(before, device=rows.device)
        places = places[:, None].expand(-1, channels.shape[1], -1)
        cache.layers[self.layer_number] = (channels.gather(2, places), state)
        return cache.prompts.pack(output.transpose(1, 2).type_as(states))[0]

    def _step(self, cache: KeyValueCache, states: torch.Tensor) -> torch.Tensor:
        """Return `_mix` of one token of each row; that of padding tokens beyond the rows is 0."""
        num_rows = len(cache.lengths)
        rows = states[:num_rows, None]
        before, state = cache.layers[self.layer_number]
        window = torch.cat([before, self._channels(rows)], -1)
        mixed = F.silu((window * self.conv_weight[:, 0]).sum(-1))[:, None]
        output, state = gated_delta_rule(self._inputs(mixed, rows), state)
        cache.layers[self.layer_number] = (window[..., 1:], state)
        output = output.squeeze(2).type_as(states)
        return F.pad(output, (0, 0, 0, 0, 0, len(states) - num_rows))

    def _channels(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what is mixed of rows of states, `[rows, channels, width]`."""
        return rows[..., : self._sizes[0]].flatten(2).transpose(1, 2)

    def _convolve(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the causal convolution of each channel, `[rows, width, channels]`."""
        weight = self.conv_weight
        channels = F.pad(self._channels(rows), (weight.shape[-1] - 1, 0))
        return F.silu(F.conv1d(channels, weight, groups=len(weight))).transpose(1, 2)

    def _inputs(self, mixed: torch.Tensor, rows: torch.Tensor) -> DeltaInputs:
        """Return the inputs of the delta rule.

        Args:
            mixed: `[rows, width, channels]`: queries, keys and values.
            rows: `[rows, width, key heads / tp, size]`, with the rates at the end.
        """
        per_key = self._values_per_key
        sizes = [self._key_size, self._key_size, per_key * self._value_size]
        query, key, value = mixed.float().unflatten(-1, (self._num_keys, -1)).split(sizes, -1)
        query, key = (
            _of_length_one(each).repeat_interleave(per_key, dim=2).transpose(1, 2)
            for each in (query, key)
        )
        value = value.unflatten(-1, (per_key, -1)).flatten(2, 3).transpose(1, 2)
        beta, decay = rows[..., self._sizes[0] :].split(per_key, -1)
        step = F.softplus(decay.flatten(2).float() + self.dt_bias)
        return DeltaInputs(
            query=query * self._key_size**-0.5,
            key=key,
            value=value,
            log_decay=(-self.A_log.float().exp() * step).transpose(1, 2),
            beta=beta.flatten(2).sigmoid().float().transpose(1, 2),
        )

    def _normalise(self, output: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the outputs of each head, normalised and times their gates."""
        weight = self.norm_weight
        if self.tp_group.size() > 1:
            # Each rank has the gradient of its own heads only.
            weight = cast("torch.Tensor", SumGradient.apply(weight))
        epsilon = self.config.layernorm_epsilon
        normal = F.rms_norm(output.float(), output.shape[-1:], eps=epsilon).type_as(output)
        return (weight * normal * F.silu(gate.float())).type_as(output)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return the parameters for a checkpoint, all but the norm's sharded by heads."""
        assert metadata is not None
        sharded = make_sharded_tensors_for_checkpoint(
            {name: getattr(self, name) for name in _SHARDED},
            prefix,
            dict.fromkeys(_SHARDED, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return super().sharded_state_dict(prefix, sharded_offsets, metadata) | sharded


def _of_length_one(vectors: torch.Tensor) -> torch.Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + _NORM_EPSILON)


def _parameter(config: DecoderConfig, *shape: int) -> nn.Parameter:
    """Return a parameter, uninitialised."""
    device = torch.cuda.current_device()
    return nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
