"""What a module does with its part of a layer: one class for each way of taking part."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from rl_dtensor_worker.parallel.tensor import collectives
from rl_dtensor_worker.parallel.tensor.group import SEQUENCE, TensorParallel

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


class Style:
    """How one module takes part; each subclass is one way.

    Args:
        ranks: Those that share the layer.
    """

    def __init__(self, ranks: TensorParallel) -> None:
        self.ranks = ranks

    def apply(self, module: nn.Module) -> None:
        """Distribute the module's parameters, and let its forward run on this rank's part."""
        self.ranks.distribute(module, self.placements(module))
        self.prepare(module)
        module.forward = partial(self._forward, module, module.forward)

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Return how each parameter lies on the ranks; those that are left out are whole."""
        return {}

    def prepare(self, module: nn.Module) -> None:
        """Adapt what else the module holds to its part."""

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `forward`, which sees local parameters, with what it needs."""
        return forward(*args, **kwargs)

    def gradient(self, placement: Placement) -> Placement:
        """Return how the gradient of a parameter that lies so comes out of a backward pass."""
        if isinstance(placement, Replicate) and self.ranks.cuts_sequence:
            return Partial()
        return placement

    def _forward(
        self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        with self._local_parameters(module):
            return self.run(module, forward, *args, **kwargs)

    @contextmanager
    def _local_parameters(self, module: nn.Module) -> Generator[None, None, None]:
        distributed = {n: p for n, p in module._parameters.items() if isinstance(p, DTensor)}
        for name, parameter in distributed.items():
            gradients = [self.gradient(parameter.placements[0])]
            module._parameters[name] = parameter.to_local(grad_placements=gradients)  # type: ignore[assignment]
        try:
            yield
        finally:
            module._parameters.update(distributed)  # type: ignore[arg-type]


class Region(Style):
    """A block whose projections cut it, and which sees whole sequences: an attention, an MLP."""

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make the hidden states whole, which come first or by their name."""
        if not self.ranks.cuts_sequence:
            return forward(*args, **kwargs)
        if "hidden_states" in kwargs:
            kwargs["hidden_states"] = self.ranks.enter_alone(kwargs["hidden_states"])
        else:
            args = (self.ranks.enter_alone(args[0]), *args[1:])
        with self.ranks.inside():
            return forward(*args, **kwargs)


class Replicated(Style):
    """Whole on every rank, and run between layers: norms, routers."""


class ReplicatedOnShards(Style):
    """Whole on every rank, and used on this rank's heads: norms of queries and keys."""

    def gradient(self, placement: Placement) -> Placement:
        """Return that every rank has a part of the sum."""
        return Partial()


class Column(Style):
    """A linear layer of which each rank has some outputs."""

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Return outputs apart."""
        return {"weight": Shard(0), "bias": Shard(0)}

    def run(
        self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Take the whole input."""
        return forward(self.ranks.enter(args[0]), *args[1:], **kwargs)


class GatheredColumn(Column):
    """The same, whose outputs every rank gets: fused projections, which are cut elsewhere."""

    def run(
        self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Join the ranks' outputs."""
        output = super().run(module, forward, *args, **kwargs)
        return collectives.gather_alike(output, self.ranks.group, -1)


class OutputLayer(Column):
    """The layer that gives the logits: each rank has those of some tokens, and keeps them."""

    def run(
        self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Take the whole input; no layer follows."""
        return forward(self.ranks.enter_alone(args[0]), *args[1:], **kwargs)


class Row(Style):
    """A linear layer of which each rank has some inputs."""

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Return inputs apart; the bias is added once, to the sum."""
        return {"weight": Shard(1)}

    def run(
        self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Sum what the ranks have, then add the bias."""
        bias = module._parameters.get("bias")
        if bias is None:
            return self.ranks.leave(forward(*args, **kwargs))
        module._parameters["bias"] = None
        return self.ranks.leave(forward(*args, **kwargs)) + bias


class SplitRow(Row):
    """The same, whose input is whole: each rank takes its part of it."""

    def run(
        self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Take this rank's part of the input."""
        part = collectives.take_part(args[0], self.ranks.group, -1)
        return super().run(module, forward, part, *args[1:], **kwargs)


class VocabularyEmbedding(Style):
    """An embedding of which each rank has some tokens."""

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Return tokens apart."""
        return {"weight": Shard(0)}

    def prepare(self, module: nn.Module) -> None:
        """Move the padding token, which gets no gradient, to its row in this rank's part."""
        padding = getattr(module, "padding_idx", None)
        if padding is not None:
            start, end = self._own_tokens(module)
            module.padding_idx = padding - start if start <= padding < end else None  # type: ignore[assignment]

    def run(
        self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Look up the tokens that this rank has, and add the others' up."""
        tokens = args[0]
        start, end = self._own_tokens(module)
        is_own = (tokens >= start) & (tokens < end)
        embedded = forward(torch.where(is_own, tokens - start, 0))
        return self.ranks.leave(torch.where(is_own[..., None], embedded, 0))

    def _own_tokens(self, module: nn.Module) -> tuple[int, int]:
        """Return the tokens `[start, end)` that this rank has."""
        num_tokens: int = module.num_embeddings  # type: ignore[assignment]
        size = num_tokens // self.ranks.size
        return self.ranks.rank * size, (self.ranks.rank + 1) * size


class Experts(Style):
    """The experts of a mixture, of which each rank has some; the router is everybody's.

    The module takes tokens `[tokens, hidden]`, the experts of each `[tokens, top_k]` and their
    weights, as transformers' experts do; an expert's number beyond the last is nobody's.
    """

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Return experts apart."""
        return {name: Shard(0) for name, _ in module.named_parameters(recurse=False)}

    def prepare(self, module: nn.Module) -> None:
        """Count this rank's experts alone, and let the others' be skipped."""
        # Grouped products leave the rows that no expert takes as they find them, unless told so.
        module._is_expert_parallel = True  # type: ignore[assignment]
        module.num_experts = module.num_experts // self.ranks.size  # type: ignore[assignment, operator]

    def run(
        self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Let this rank's experts see their tokens, and add the ranks' results up."""
        hidden, chosen, weights = args
        if self.ranks.cuts_sequence:
            chosen = collectives.all_gather_dim(chosen, self.ranks.group, SEQUENCE)
        num_own: int = module.num_experts  # type: ignore[assignment]
        own = chosen - self.ranks.rank * num_own
        own = torch.where((own >= 0) & (own < num_own), own, num_own)
        return self.ranks.leave(forward(self.ranks.enter(hidden), own, self.ranks.enter(weights)))
