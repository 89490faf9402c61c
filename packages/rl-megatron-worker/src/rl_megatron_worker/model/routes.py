"""Router replay: which experts each token took, recorded in one pass and taken again in others.

Two engines, or two batch shapes, round a router's scores otherwise, and a token near a boundary
then takes other experts: its log-probability jumps. With the routes of the sampler, or of the pass
that computed the old log-probabilities, training differentiates the network that was sampled from
(arXiv:2507.18071, section 5.3, and arXiv:2510.11370).

Megatron-core asks an object at each router for its choice. `Routes` gives it one, and moves routes
between the rows of a batch and the tokens of this rank: pipeline stages have some of the layers,
and context- and sequence-parallel ranks some of the tokens.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from rl_interfaces import ROUTER_CHOOSES

from rl_megatron_worker.model.experts import expert_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from torch import nn

    from rl_megatron_worker.layout import PackedLayout
    from rl_megatron_worker.model.experts import GroupLimitedChoice

COLUMN = "routed_experts"
"""Of a batch: `[batch, seq, layers, experts per token]`, any integer; -1 is free.

The layers are all of the model, as vLLM has them, or those with experts alone."""
FREE = ROUTER_CHOOSES
"""In place of an expert: the router chooses for this token."""

Choice = tuple[torch.Tensor, torch.Tensor]


class TokenChoice:
    """What one router takes; Megatron-core calls `get_replay_topk`.

    Args:
        own: The model's own choice; None if it is Megatron-core's.
    """

    def __init__(self, own: GroupLimitedChoice | None = None) -> None:
        self._own = own
        self._given: torch.Tensor | None = None
        self._is_forward = False
        self._recorded: list[torch.Tensor] = []
        # Of forward passes whose layers the backward pass computes again, in the same order.
        self._again: deque[torch.Tensor | None] = deque()

    @contextmanager
    def forward(
        self, given: torch.Tensor | None, *, computed_again: bool
    ) -> Generator[None, None, None]:
        """Take `given`, `[tokens, experts per token]`, in the body, a chunk's forward pass."""
        self._given, self._is_forward = given, True
        if computed_again:
            self._again.append(given)
        try:
            yield
        finally:
            self._given, self._is_forward = None, False

    def take_recorded(self) -> list[torch.Tensor]:
        """Return the choices since the last call, one for each forward pass."""
        recorded, self._recorded = self._recorded, []
        return recorded

    def forget(self) -> None:
        """Drop what an earlier step has left."""
        self._again.clear()
        self._recorded.clear()

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., Choice] | None = None,
    ) -> Choice:
        """Return scores and experts of each token; Megatron-core's arguments and name.

        Args:
            scores: `[tokens, experts]`.
            topk: Experts per token.
            num_groups: Of group-limited routing.
            group_topk: Of group-limited routing.
            default_compute_topk: The router's own choice.
        """
        assert default_compute_topk is not None, "Megatron-core passes its own"
        choose = default_compute_topk if self._own is None else self._own.get_replay_topk
        chosen = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)[1]
        given = self._given if self._is_forward else self._next()
        if given is not None:
            given = given.to(torch.int64)
            chosen = torch.where(given[:, :1] == FREE, chosen, given)
        if self._is_forward:
            self._recorded.append(chosen)
        return scores.gather(1, chosen), chosen

    def _next(self) -> torch.Tensor | None:
        # A layer that is computed again outside of a forward pass.
        return self._again.popleft() if self._again else None


class Routes:
    """The routers of this rank's layers.

    Args:
        chunks: The model's chunks on this rank.
        has_experts: Of every layer of the model, whether it has experts.
    """

    def __init__(self, chunks: Sequence[nn.Module], has_experts: Sequence[bool]) -> None:
        self._layers = [layer for layer, has in enumerate(has_experts) if has]
        columns = {layer: column for column, layer in enumerate(self._layers)}
        self.num_layers = len(columns)
        self._num_all = len(has_experts)
        self._of_chunk: dict[int, list[tuple[int, TokenChoice]]] = {}
        self._computes_again = False
        for chunk in chunks:
            found: list[tuple[int, TokenChoice]] = []
            for layer in expert_layers(chunk):
                router = cast("Any", layer.router)
                choice = router.router_replay = TokenChoice(router.router_replay)
                # Megatron-core counts layers from 1.
                found.append((columns[cast("int", layer.layer_number) - 1], choice))
            self._of_chunk[id(chunk)] = found
            config = cast("Any", chunk).config
            self._computes_again |= config.recompute_granularity is not None
        self._chunks = list(chunks)

    def with_experts(self, routes: torch.Tensor) -> torch.Tensor:
        """Return `[..., layers with experts, chosen]` of routes that may be of all layers.

        What they say of a layer without a router is no choice of the model's.
        """
        is_of_all = routes.dim() > 1 and routes.shape[-2] == self._num_all
        return routes[..., self._layers, :] if is_of_all else routes

    @contextmanager
    def of(self, chunk: nn.Module, layout: PackedLayout) -> Generator[None, None, None]:
        """Route the tokens of a chunk's forward pass as the batch says, or as they are."""
        given = self._of_tokens(layout)
        again = self._computes_again and torch.is_grad_enabled()
        with ExitStack() as leaving:
            for column, choice in self._of_chunk[id(chunk)]:
                own = None if given is None else given[:, column]
                leaving.enter_context(choice.forward(own, computed_again=again))
            yield

    def forget(self) -> None:
        """Drop what an earlier step has left."""
        for choices in self._of_chunk.values():
            for _, choice in choices:
                choice.forget()

    def collect(self, layouts: Sequence[PackedLayout]) -> list[torch.Tensor]:
        """Return the routes of the last passes over `layouts`, on every rank of a model replica.

        Collective over the replica. Returns `[rows, width, layers with experts, experts per token]`
        int16 for each layout; padding is `FREE`.
        """
        own: list[dict[int, torch.Tensor]] = [{} for _ in layouts]
        for choices in self._of_chunk.values():
            for column, choice in choices:
                for found, recorded in zip(own, choice.take_recorded(), strict=True):
                    found[column] = recorded
        return [self._to_rows(layout, found) for layout, found in zip(layouts, own, strict=True)]

    def _to_rows(self, layout: PackedLayout, found: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return what was recorded for a layout in the order of its rows."""
        columns = sorted(found)
        tokens = layout.tokens.shape[0]
        # One more than each expert: 0 is what other stages have.
        shape = (tokens, self.num_layers, _num_chosen(self._chunks[0]))
        known = torch.zeros(shape, dtype=torch.int32, device=layout.tokens.device)
        if columns:
            local = torch.stack([found[column] for column in columns], 1).int() + 1
            if _shards_sequence(self._chunks[0]):
                local = gather_from_sequence_parallel_region(
                    local, tensor_parallel_output_grad=False
                )
            known[:, columns] = local
        stages = cast("dist.ProcessGroup", parallel_state.get_pipeline_model_parallel_group())
        if stages.size() > 1:
            dist.all_reduce(known, group=stages)
        rows = layout.packed.unpack(layout.rows.gather(known)[None], pad_value=0)
        return (rows - 1).to(torch.int16)

    def _of_tokens(self, layout: PackedLayout) -> torch.Tensor | None:
        """Return the routes of this rank's tokens; None: all free.

        `[tokens, layers with experts, chosen]`.
        """
        if layout.routes is None:
            return None
        given = self.with_experts(layout.routes)
        if not _shards_sequence(self._chunks[0]):
            return given
        return given.chunk(parallel_state.get_tensor_model_parallel_world_size())[
            parallel_state.get_tensor_model_parallel_rank()
        ]


def check_routes(
    columns: Mapping[str, object], *, num_layers: int, num_experts: int, num_chosen: int
) -> None:
    """Raise if a batch's routes are not those of a model.

    Args:
        columns: The batch, on the CPU, with routes.
        num_layers: Layers with experts.
        num_experts: Experts of a layer.
        num_chosen: Experts per token.

    Raises:
        ValueError: The message names the column and the numbers.
    """
    routes, tokens, lengths = (columns[key] for key in (COLUMN, "input_ids", "input_lengths"))
    assert isinstance(tokens, torch.Tensor)
    assert isinstance(lengths, torch.Tensor)
    expected = (*tokens.shape, num_layers, num_chosen)
    if not isinstance(routes, torch.Tensor) or routes.is_floating_point():
        raise ValueError(f"{COLUMN} must be a tensor of integers, got {routes!r:.80}")
    if tuple(routes.shape) != expected:
        raise ValueError(
            f"{COLUMN} has shape {[*routes.shape]}, expected {[*expected]}: the batch's tokens, "
            "layers with experts (or all layers), experts per token"
        )
    # Those of padding are never read.
    routes = routes[torch.arange(tokens.shape[1]) < lengths[:, None]]
    if not routes.numel():
        return
    low, high = int(routes.min()), int(routes.max())
    if low < FREE or high >= num_experts:
        raise ValueError(
            f"{COLUMN} has values from {low} to {high}, expected 0 to {num_experts - 1}, or {FREE} "
            "for a token that the router chooses for"
        )
    ordered = routes.sort(-1).values
    is_free = routes == FREE
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != FREE)
    partly = is_free.any(-1) & ~is_free.all(-1)
    if bool(twice.any() or partly.any()):
        raise ValueError(
            f"{COLUMN} gives a token the same expert twice, or less than {num_chosen} experts"
        )


def _num_chosen(chunk: nn.Module) -> int:
    return cast("Any", chunk).config.moe_router_topk


def _shards_sequence(chunk: nn.Module) -> bool:
    return cast("Any", chunk).config.sequence_parallel
