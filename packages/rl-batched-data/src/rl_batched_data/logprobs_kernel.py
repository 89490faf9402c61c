"""Target log-probabilities, entropies and top-k logits over a large vocabulary, tile by tile.

At most one float32 tile of logits exists at a time; with an output matrix, the full logits are
never materialised. The forward pass is an online softmax (Milakov and Gimelshein 2018,
arXiv:1805.02867) over tiles, and the backward pass recomputes every tile but the last, as in Cut
Cross-Entropy (Wijmans et al. 2024, arXiv:2411.09009). If the vocabulary is sharded over ranks, the
forward pass all-reduces a few values per position and the backward pass the gradient of the hidden
states, as Megatron-LM's vocab-parallel cross-entropy does.

Shapes: `N` positions, `V` this rank's vocabulary shard, `H` hidden size, `X` either `V` (logits) or
`H` (hidden states), `K` top logits; `n` and `v` are the positions and tokens of a tile.
"""

# torch annotates some of its functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import isqrt
from typing import Protocol

import torch
import torch.distributed as dist

from rl_batched_data.columns import check_positive

# Stands for -inf: a difference of two is finite, where -inf - -inf is NaN.
_LOWEST = torch.finfo(torch.float32).min

_GradientTile = Callable[[slice, slice], torch.Tensor]
_Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
# Inputs, matrix, bias, targets within the shard, normalizers, entropies.
_Saved = tuple[
    torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor
]


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitTransform:
    """Logit scaling, soft cap and temperature, in this order.

    `soft_cap * tanh(scale * x / soft_cap) / temperature`, as in Gemma 2 (arXiv:2408.00118); without
    a soft cap, `scale * x / temperature`.
    """

    scale: float
    soft_cap: float | None
    temperature: float

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature={self.temperature} must be greater than 0")
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ValueError(f"soft_cap={self.soft_cap} must be greater than 0")

    def apply_(self, raw: torch.Tensor) -> torch.Tensor:
        """Transform `raw` logits in place."""
        if self.soft_cap is None:
            factor = self.scale / self.temperature
            return raw if factor == 1.0 else raw.mul_(factor)
        return raw.mul_(self.scale / self.soft_cap).tanh_().mul_(self.soft_cap / self.temperature)

    def slope(self, logits: torch.Tensor) -> torch.Tensor | float:
        """Return the derivative of the transform, given the transformed `logits`."""
        if self.soft_cap is None:
            return self.scale / self.temperature
        # y = cap / T * tanh(scale * x / cap): dy/dx = scale / T * (1 - tanh^2), tanh = T * y / cap.
        part = logits.mul(self.temperature / self.soft_cap)
        return part.square_().neg_().add_(1).mul_(self.scale / self.temperature)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringTask:
    """The options of one scoring call."""

    transform: LogitTransform
    vocab_size: int
    """Size of this rank's vocabulary shard."""
    vocab_start: int
    """First token id of the shard."""
    tp_group: dist.ProcessGroup | None
    """The group that the vocabulary is sharded over."""
    with_entropy: bool
    top_k: int
    chunk_logits: int
    """Logits per tile."""

    def __post_init__(self) -> None:
        check_positive("chunk_logits", self.chunk_logits)
        num_ranks = 1 if self.tp_group is None else dist.get_world_size(self.tp_group)
        if not 0 <= self.top_k <= self.vocab_size * num_ranks:
            raise ValueError(f"top_k={self.top_k} is not within 0..{self.vocab_size * num_ranks}")


class _Context(Protocol):
    """The members of autograd's context that `VocabScores` uses."""

    task: ScoringTask
    kept: _KeptTile | None
    needs_input_grad: tuple[bool, bool, bool, bool, bool]

    @property
    def saved_tensors(self) -> _Saved: ...
    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...
    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None: ...


class VocabScores(torch.autograd.Function):
    """Scores of target tokens, differentiable in inputs, output matrix and bias.

    `apply(inputs, matrix, bias, targets, task)` returns log-probabilities, normalizers, entropies
    (zeros unless requested), the `K` largest logits, and their token ids.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        inputs_NX: torch.Tensor,
        matrix_VH: torch.Tensor | None,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        task: ScoringTask,
    ) -> tuple[torch.Tensor, ...]:
        """Accumulate the online softmax over all tiles."""
        local_N = targets_N - task.vocab_start
        source = _logit_source(task, inputs_NX, matrix_VH, bias_V)
        # Only a tile that cost a product is worth keeping. It holds exponentials by then, and the
        # backward passes of a soft cap and of the entropy need the logits.
        reusable = task.transform.soft_cap is None and not task.with_entropy
        keeps_tile = matrix_VH is not None and reusable and any(ctx.needs_input_grad[:3])
        ctx.kept = None
        sums = _Sums.empty(len(local_N), task.top_k, inputs_NX.device)
        with _without_autocast(inputs_NX.device):
            for rows in source.rows:
                for cols in source.cols:
                    logits_nv = task.transform.apply_(source.tile(rows, cols))
                    sums.rows(rows).add(logits_nv, local_N[rows], cols, task)
                    # The last tile is still in memory: keeping it saves one product in backward.
                    if keeps_tile and (rows.stop, cols.stop) == (len(local_N), task.vocab_size):
                        highest_n = sums.highest_N[rows].clone()
                        ctx.kept = _KeptTile(logits_nv, highest_n, place=(rows, cols))
        if task.tp_group is not None:
            sums.join_ranks(task.tp_group)
        normalizer_N, entropy_N = sums.normalizer(), sums.entropy(task)
        # A target that no shard has found is outside the vocabulary: NaN rather than a wrong value.
        logprobs_N = torch.where(sums.found_N > 0, sums.target_N, torch.nan) - normalizer_N
        ctx.save_for_backward(inputs_NX, matrix_VH, bias_V, local_N, normalizer_N, entropy_N)
        ctx.task = task
        ctx.mark_non_differentiable(normalizer_N, sums.top_logits_NK, sums.top_tokens_NK)
        return logprobs_N, normalizer_N, entropy_N, sums.top_logits_NK, sums.top_tokens_NK

    @staticmethod
    def backward(ctx: _Context, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Recompute each tile and overwrite it with the gradient of its logits."""
        inputs_NX, matrix_VH, bias_V, local_N, normalizer_N, entropy_N = ctx.saved_tensors
        task = ctx.task

        def gradient_tile(rows: slice, cols: slice) -> torch.Tensor:
            grad_n1 = push = grads[0][rows, None]
            kept = ctx.kept
            if kept is not None and kept.place == (rows, cols):
                # Overwritten below: a second backward over the graph recomputes the tile.
                ctx.kept = None
                slope = task.transform.slope(kept.exponentials_nv)
                probs_nv = kept.probabilities_(normalizer_N[rows])
            else:
                logits_nv = task.transform.apply_(source.tile(rows, cols))
                slope = task.transform.slope(logits_nv)
                logits_nv.sub_(normalizer_N[rows, None])
                # dH/dlogit = -p * (log p + H), so both gradients share the factor -p.
                if task.with_entropy:
                    push = logits_nv.clamp(min=_LOWEST).add_(entropy_N[rows, None])
                    push.mul_(grads[2][rows, None]).add_(grad_n1)
                probs_nv = logits_nv.exp_()
            # d log p(target) / d logit = [is target] - p.
            grad_nv = probs_nv.mul_(push).neg_()
            position_n1, inside_n1 = _within(local_N[rows, None], cols)
            grad_nv.scatter_add_(1, position_n1, grad_n1 * inside_n1)
            return grad_nv.mul_(slope)

        with _without_autocast(inputs_NX.device):
            source = _logit_source(task, inputs_NX, matrix_VH, bias_V)
            found = source.backward(gradient_tile, ctx.needs_input_grad[:3])
        if task.tp_group is not None and matrix_VH is not None and found[0] is not None:
            # Each rank holds the gradient from its own vocabulary shard only.
            dist.all_reduce(found[0], group=task.tp_group)
        return (*found, None, None)


@dataclass(frozen=True, slots=True)
class _KeptTile:
    """The last tile of the forward pass, exponentiated."""

    exponentials_nv: torch.Tensor
    """exp(logits - highest)."""
    highest_n: torch.Tensor
    """Maximum of this rank's logits per position."""
    place: tuple[slice, slice]
    """Rows and columns of the tile."""

    def probabilities_(self, normalizer_n: torch.Tensor) -> torch.Tensor:
        """Return the probabilities, overwriting the exponentials."""
        return self.exponentials_nv.mul_((self.highest_n - normalizer_n).exp_()[:, None])


@dataclass(kw_only=True, slots=True)
class _Sums:
    """Online-softmax accumulators per position, updated in place."""

    highest_N: torch.Tensor
    """Running maximum of the logits."""
    total_N: torch.Tensor
    """Sum of exp(logit - highest)."""
    weighted_N: torch.Tensor
    """Sum of (logit - highest) * exp(logit - highest), for the entropy."""
    target_N: torch.Tensor
    """Logit of the target; zero if it is in another rank's shard."""
    found_N: torch.Tensor
    """One if the target is in this rank's shard, else zero."""
    top_logits_NK: torch.Tensor
    top_tokens_NK: torch.Tensor

    @classmethod
    def empty(cls, num_positions: int, top_k: int, device: torch.device) -> _Sums:
        """Return the accumulators of no tiles."""
        zeros = torch.zeros(4, num_positions, device=device)
        top_logits_NK = torch.full((num_positions, top_k), -torch.inf, device=device)
        return cls(
            highest_N=torch.full((num_positions,), _LOWEST, device=device),
            total_N=zeros[0],
            weighted_N=zeros[1],
            target_N=zeros[2],
            found_N=zeros[3],
            top_logits_NK=top_logits_NK,
            top_tokens_NK=torch.zeros_like(top_logits_NK, dtype=torch.int64),
        )

    def rows(self, rows: slice) -> _Sums:
        """Return a view of some positions."""
        return _Sums(
            highest_N=self.highest_N[rows],
            total_N=self.total_N[rows],
            weighted_N=self.weighted_N[rows],
            target_N=self.target_N[rows],
            found_N=self.found_N[rows],
            top_logits_NK=self.top_logits_NK[rows],
            top_tokens_NK=self.top_tokens_NK[rows],
        )

    def add(
        self, logits_nv: torch.Tensor, local_n: torch.Tensor, cols: slice, task: ScoringTask
    ) -> None:
        """Accumulate one tile of logits, which is overwritten."""
        position_n1, inside_n1 = _within(local_n[:, None], cols)
        chosen_n1 = torch.where(inside_n1, logits_nv.gather(1, position_n1), 0)
        self.target_N += chosen_n1.squeeze(1)
        self.found_N += inside_n1.squeeze(1)
        if task.top_k:
            count = min(task.top_k, logits_nv.shape[1])
            values_nk, places_nk = logits_nv.topk(count, dim=1)
            self._add_top(values_nk, places_nk + (task.vocab_start + cols.start))
        highest_n = torch.maximum(self.highest_N, logits_nv.amax(1))
        if cols.start == 0:
            # Nothing was added to these positions before.
            self.highest_N.copy_(highest_n)
        else:
            self._rebase(highest_n)
        logits_nv.sub_(self.highest_N[:, None])
        if task.with_entropy:
            # The clamp makes p * log p zero, not NaN, for logits of -inf.
            probs_nv = logits_nv.exp()
            self.total_N += probs_nv.sum(1)
            self.weighted_N += probs_nv.mul_(logits_nv.clamp_(min=_LOWEST)).sum(1)
        else:
            self.total_N += logits_nv.exp_().sum(1)

    def join_ranks(self, group: dist.ProcessGroup) -> None:
        """All-reduce the accumulators over `group`."""
        highest_N = self.highest_N.clone()
        dist.all_reduce(highest_N, op=dist.ReduceOp.MAX, group=group)
        # Sums are relative to each rank's own maximum: rescale to the global one before adding.
        self._rebase(highest_N)
        joined = torch.stack([self.total_N, self.weighted_N, self.target_N, self.found_N])
        dist.all_reduce(joined, group=group)
        self.total_N, self.weighted_N, self.target_N, self.found_N = joined
        if self.top_logits_NK.shape[1]:
            own = self.top_logits_NK, self.top_tokens_NK
            logits, tokens = (_gather(values.contiguous(), group) for values in own)
            self.top_logits_NK.fill_(-torch.inf)
            self._add_top(torch.cat(logits, dim=1), torch.cat(tokens, dim=1))

    def normalizer(self) -> torch.Tensor:
        """Return the log-sum-exp of the logits."""
        return self.total_N.log() + self.highest_N

    def entropy(self, task: ScoringTask) -> torch.Tensor:
        """Return the entropy in nats, or zeros unless requested."""
        # H = log(total) - E[logit - highest].
        if not task.with_entropy:
            return torch.zeros_like(self.total_N)
        return self.total_N.log() - self.weighted_N / self.total_N

    def _rebase(self, highest_N: torch.Tensor) -> None:
        """Rescale the sums to a new running maximum."""
        # With d = old - new maximum: total' = e^d total, weighted' = e^d (weighted + d total). The
        # clamp keeps d finite after a tile of -inf alone, where 0 * -inf would be NaN.
        change_N = (self.highest_N - highest_N).clamp_(min=_LOWEST)
        factor_N = change_N.exp()
        self.weighted_N.addcmul_(change_N, self.total_N).mul_(factor_N)
        self.total_N.mul_(factor_N)
        self.highest_N.copy_(highest_N)

    def _add_top(self, values_nk: torch.Tensor, tokens_nk: torch.Tensor) -> None:
        values = torch.cat([self.top_logits_NK, values_nk], dim=1)
        tokens = torch.cat([self.top_tokens_NK, tokens_nk], dim=1)
        best, places = values.topk(self.top_logits_NK.shape[1], dim=1)
        self.top_logits_NK.copy_(best)
        self.top_tokens_NK.copy_(tokens.gather(1, places))


def _logit_source(
    task: ScoringTask,
    inputs_NX: torch.Tensor,
    matrix_VH: torch.Tensor | None,
    bias_V: torch.Tensor | None,
) -> _GivenLogits | _OutputHead:
    if matrix_VH is None:
        return _GivenLogits(inputs_NX, task.chunk_logits)
    return _OutputHead(inputs_NX, matrix_VH, bias_V, task.chunk_logits)


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Disable autocast, which would compute the matrix products in its own dtype."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _within(local_n1: torch.Tensor, cols: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the target's column in a tile, clamped to the tile, and whether it is inside."""
    inside_n1 = (local_n1 >= cols.start) & (local_n1 < cols.stop)
    return (local_n1 - cols.start).clamp_(0, cols.stop - cols.start - 1), inside_n1


def _gather(values: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, values, group=group)
    return gathered


class _GivenLogits:
    """Tiles sliced from given logits, and their backward pass."""

    def __init__(self, logits_NV: torch.Tensor, chunk_logits: int) -> None:
        self.logits_NV = logits_NV
        num_positions, vocab_size = logits_NV.shape
        self.rows, self.cols = _tiling(
            num_positions, vocab_size, chunk_logits, height=chunk_logits // vocab_size
        )

    def tile(self, rows: slice, cols: slice) -> torch.Tensor:
        """Return a float32 tile that the caller may overwrite."""
        return self.logits_NV[rows, cols].to(torch.float32, copy=True)

    def backward(self, gradient_tile: _GradientTile, needed: tuple[bool, bool, bool]) -> _Gradients:
        """Return the gradients of inputs, matrix and bias; see `_OutputHead.backward`."""
        if not needed[0]:
            return None, None, None
        grad_NV = torch.empty_like(self.logits_NV)
        for rows in self.rows:
            for cols in self.cols:
                grad_NV[rows, cols] = gradient_tile(rows, cols)
        return grad_NV, None, None


class _OutputHead:
    """Tiles computed as hidden states times output matrix, accumulated in float32."""

    def __init__(
        self,
        hidden_NH: torch.Tensor,
        matrix_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        chunk_logits: int,
    ) -> None:
        self.hidden_NH, self.matrix_VH, self.bias_V = hidden_NH, matrix_VH, bias_V
        # A square tile reads the fewest hidden states and matrix rows per logit.
        self.rows, self.cols = _tiling(
            len(hidden_NH), len(matrix_VH), chunk_logits, height=isqrt(chunk_logits)
        )

    def tile(self, rows: slice, cols: slice) -> torch.Tensor:
        """Return a float32 tile that the caller may overwrite."""
        raw_nv = _product(self.hidden_NH[rows], self.matrix_VH[cols].T)
        return raw_nv if self.bias_V is None else raw_nv.add_(self.bias_V[cols])

    def backward(self, gradient_tile: _GradientTile, needed: tuple[bool, bool, bool]) -> _Gradients:
        """Return the gradients of inputs, matrix and bias, None for those not `needed`.

        Args:
            gradient_tile: Returns the gradient of the logits of a tile, given its rows and columns.
            needed: Whether each of the three gradients is needed.
        """
        hidden, matrix, bias = self.hidden_NH, self.matrix_VH, self.bias_V
        grad_NH = torch.zeros_like(hidden, dtype=torch.float32) if needed[0] else None
        grad_VH = torch.empty_like(matrix) if needed[1] else None
        grad_V = torch.empty_like(bias) if needed[2] and bias is not None else None
        # The vocabulary is the outer loop: only one slice of the matrix gradient is in float32 at a
        # time. The order is reversed to free the tile that the forward pass kept first.
        for cols in reversed(self.cols):
            grad_vH = torch.zeros_like(matrix[cols], dtype=torch.float32)
            grad_v = torch.zeros(len(grad_vH), device=matrix.device)
            for rows in reversed(self.rows):
                grad_nv = gradient_tile(rows, cols)
                if grad_V is not None:
                    grad_v += grad_nv.sum(0)
                # Tensor cores take both factors in the matrix's dtype.
                grad_nv = grad_nv.to(matrix.dtype) if grad_nv.is_cuda else grad_nv
                if grad_NH is not None:
                    _add_product(grad_NH[rows], grad_nv, matrix[cols])
                if grad_VH is not None:
                    _add_product(grad_vH, grad_nv.T, hidden[rows])
            if grad_VH is not None:
                grad_VH[cols] = grad_vH
            if grad_V is not None:
                grad_V[cols] = grad_v
        return None if grad_NH is None else grad_NH.to(hidden.dtype), grad_VH, grad_V


def _tiling(
    num_positions: int, vocab_size: int, chunk_logits: int, *, height: int
) -> tuple[list[slice], list[slice]]:
    """Return slices of rows and of columns; every pair is a tile of at most `chunk_logits`."""
    height = max(1, min(height, num_positions))
    width = min(vocab_size, chunk_logits // height)
    return _slices(num_positions, height), _slices(vocab_size, width)


def _slices(size: int, step: int) -> list[slice]:
    return [slice(low, min(low + step, size)) for low in range(0, size, step)]


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.dtype == torch.float32:
        return left @ right
    # Tensor cores take bfloat16 factors and accumulate in float32; the CPU has no such product.
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if right.dtype == torch.float32:
        total.addmm_(left, right)
    elif right.is_cuda:
        total.add_(torch.mm(left, right, out_dtype=torch.float32))
    else:
        total.addmm_(left, right.float())
