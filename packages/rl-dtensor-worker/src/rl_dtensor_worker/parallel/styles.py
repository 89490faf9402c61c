"""Tensor parallelism of single modules: the group, and one style per way of sharding.

Parameters are DTensors on the mesh axis `tp`, so that the optimizer, checkpoints and weight
transfer see shards with their placements. A forward pass sees the local shards as plain tensors,
which keeps DTensor's dispatch out of it: a layer costs its kernels and its collectives.

Between layers activations are replicated or, with sequence parallelism, sharded along the sequence
(Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"). In both
cases `gather_input` leads into a sharded layer and `reduce_output` out of it.

A linear layer with adapters keeps its style, which gathers its input and reduces its output; its
submodules get styles that follow from it. `B @ A` is sharded as the layer's weight is. With sharded
outputs, B has the same rows and A is replicated. With sharded inputs, A has the same columns and B
is replicated: each rank's product is a partial sum, and joins the one reduction of the layer. In
both cases the gradient of the replicated factor is partial on each rank.
"""

from __future__ import annotations

from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional

from rl_dtensor_worker.parallel import collectives

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping

    from torch.distributed.device_mesh import DeviceMesh

    Forward = Callable[..., Tensor]


def sequence_dim(values: Tensor) -> int:
    """Return the sequence dim of activations `[batch, seq, ..., hidden]` or `[tokens, hidden]`."""
    return 1 if values.ndim > 2 else 0


class SequenceScope(Enum):
    """Where sequence parallelism shards activations along the sequence, see `sequence`."""

    MODEL = "the whole model"
    """From the embedding to the output layer, but not inside of blocks."""
    LAYERS = "the decoder layers"
    """The same, but full before the first decoder layer and after the last one."""
    BETWEEN_LAYERS = "what activation_checkpointing keeps between the decoder layers"
    """From each decoder layer to the next one; full inside of layers too."""


class TensorParallel:
    """The ranks that shard each layer together.

    Args:
        mesh: Their one-axis mesh.
        sequence_parallel: Whether activations between layers are sharded along the sequence.
    """

    def __init__(self, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.rank = mesh.get_local_rank()
        self.size = mesh.size()
        self.scope = SequenceScope.MODEL
        self._shards_sequences = sequence_parallel
        self._is_in_layer = False
        # The last input of `gather_input` and its gather, for the layers that take the same input.
        self._last_gather: tuple[Tensor, Tensor] | None = None
        self._input_is_gathered = False
        # By original and by distributed parameter: a second owner of a tied one may have either.
        self._distributed: dict[nn.Parameter, nn.Parameter] = {}

    @contextmanager
    def unsharded_sequences(self) -> Generator[None, None, None]:
        """Switch sequence parallelism off inside.

        For forwards without gradients, whose sequences may be of any length: sequence parallelism
        needs lengths that the group divides.
        """
        before, self._shards_sequences = self._shards_sequences, False
        try:
            yield
        finally:
            self._shards_sequences = before

    @contextmanager
    def in_layer(self) -> Generator[None, None, None]:
        """Shard sequences inside, where the scope leaves them full outside of layers."""
        before, self._is_in_layer = self._is_in_layer, True
        try:
            yield
        finally:
            self._is_in_layer = before

    @property
    def shards_sequences(self) -> bool:
        """Whether activations are sharded along the sequence somewhere in a forward."""
        return self._shards_sequences

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations are sharded along the sequence here, outside of blocks."""
        is_in_scope = self.scope is SequenceScope.MODEL or self._is_in_layer
        return self._shards_sequences and is_in_scope

    def gather_input(self, values: Tensor) -> Tensor:
        """Return the full `values`, for a layer whose parameters are sharded.

        Modules that take the same tensor, such as the query, key and value projections, share one
        gather, and so one collective in the backward pass.
        """
        if self._input_is_gathered:
            return values
        # By identity: an equal tensor elsewhere in the graph needs a gradient of its own.
        if self._last_gather is None or self._last_gather[0] is not values:
            self._last_gather = values, self.gather_input_once(values)
        return self._last_gather[1]

    def gather_input_once(self, values: Tensor) -> Tensor:
        """Return what `gather_input` does without sharing it.

        For modules that no `reduce_output` follows, which would leave a gather that outlives them.
        """
        # Either way each rank uses its own shard of the weights, so that gradients of the input are
        # partial: both conjugates sum them.
        if self.sequence_parallel:
            return collectives.gather_for_sharded_use(values, self.group, sequence_dim(values))
        return collectives.copy_to_group(values, self.group)

    @contextmanager
    def input_is_gathered(self) -> Generator[None, None, None]:
        """Make `gather_input` the identity: a surrounding block has gathered already."""
        self._input_is_gathered = True
        try:
            yield
        finally:
            self._input_is_gathered = False

    def forget_input(self) -> None:
        """Release the last gathered input, which a model without `reduce_output` would keep."""
        self._last_gather = None

    @property
    def input_is_full(self) -> bool:
        """Whether a surrounding block has gathered the sequences."""
        return self._input_is_gathered

    def reduce_output(self, values: Tensor) -> Tensor:
        """Return the sum of the ranks' partial `values`.

        With sequence parallelism: its local chunk along the sequence.
        """
        # The next layer's input is another tensor; holding this one would only keep memory.
        self.forget_input()
        if self.sequence_parallel:
            return collectives.reduce_scatter_to_group(values, self.group, sequence_dim(values))
        return collectives.reduce_from_group(values, self.group)

    def vocabulary_range(self, size: int) -> tuple[int, int]:
        """Return the range `[start, end)` of this rank's rows of a vocabulary of `size`.

        Each rank but the last ones has the same number; as `Shard` places them.
        """
        most = self._most_rows(size)
        return min(self.rank * most, size), min((self.rank + 1) * most, size)

    def gather_logits(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Return the full logits `[..., vocab]` from this rank's of them. Collective."""
        # An all-gather takes equal parts. What fills up a smaller one is cut off after it, and gets
        # no gradient.
        full = functional.pad(logits, (0, self._most_rows(vocab_size) - logits.shape[-1]))
        return collectives.gather_for_replicated_use(full, self.group, -1)[..., :vocab_size]

    def _most_rows(self, vocab_size: int) -> int:
        return -(-vocab_size // self.size)

    def distribute(self, module: nn.Module, placements: dict[str, Placement]) -> None:
        """Replace the module's own parameters by DTensors on this group; tied ones stay tied.

        Args:
            module: Its submodules are left alone.
            placements: By parameter name; a parameter that is not named is replicated.

        Raises:
            ValueError: A parameter is tied to one with another placement.
        """
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = placements.get(name, Replicate())
            known = self._distributed.get(parameter)
            if known is None:
                known = nn.Parameter(
                    # Without a source rank: every rank has the tensor, on the meta device.
                    distribute_tensor(parameter, self.mesh, [placement], src_data_rank=None),
                    requires_grad=parameter.requires_grad,
                )
                self._distributed[parameter] = self._distributed[known] = known
            if known.placements != (placement,):  # type: ignore[attr-defined]
                raise ValueError(
                    f"{type(module).__name__}.{name} is tied to a parameter that is placed as "
                    f"{known.placements}, and would be {placement}: "  # type: ignore[attr-defined]
                    "the plan must treat both alike"
                )
            module.register_parameter(name, known)


class Style:
    """How one module is sharded and which collectives its forward needs; a subclass per way.

    Args:
        tp: The ranks that shard the layer.
    """

    def __init__(self, tp: TensorParallel) -> None:
        self.tp = tp

    def apply(self, module: nn.Module) -> None:
        """Distribute the module's parameters and wrap its forward."""
        self.tp.distribute(module, self.placements(module))
        self.prepare(module)
        # Not by hooks: torch skips a forward hook if the forward raises, and the DTensors must be
        # put back even then.
        module.forward = partial(self._forward, module, module.forward)

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Return the placement of each parameter; those that are not named are replicated."""
        return {}

    def prepare(self, module: nn.Module) -> None:
        """Adapt the module's other attributes to its local shard."""

    def run(self, module: nn.Module, forward: Forward, *args: Tensor, **kwargs: object) -> object:
        """Call `forward`, which sees the local shards, with the collectives around it."""
        return forward(*args, **kwargs)

    def gradient(self, placement: Placement) -> Placement:
        """Return the placement of a parameter's gradient after a backward pass."""
        # With sequence parallelism a replicated module has seen this rank's tokens alone.
        if isinstance(placement, Replicate) and self.tp.sequence_parallel:
            return Partial()
        return placement

    def _forward(
        self, module: nn.Module, forward: Forward, *args: Tensor, **kwargs: object
    ) -> object:
        with self._local_parameters(module):
            return self.run(module, forward, *args, **kwargs)

    @contextmanager
    def _local_parameters(self, module: nn.Module) -> Generator[None, None, None]:
        """Show the module its local shards as plain tensors; gradients reach the DTensors."""
        distributed = {n: p for n, p in module._parameters.items() if isinstance(p, DTensor)}
        for name, parameter in distributed.items():
            gradients = [self.gradient(parameter.placements[0])]
            # Into `_parameters`, past `register_parameter`: the shards are no leaves of autograd.
            module._parameters[name] = parameter.to_local(grad_placements=gradients)  # type: ignore[assignment]
        try:
            yield
        finally:
            module._parameters.update(distributed)  # type: ignore[arg-type]


class Region(Style):
    """A block of sharded projections that needs full sequences: an attention, an MLP."""

    def run(self, module: nn.Module, forward: Forward, *args: Tensor, **kwargs: object) -> object:
        """Gather the hidden states, which are the first argument or a keyword argument."""
        if not self.tp.sequence_parallel:
            return forward(*args, **kwargs)
        hidden = kwargs.get("hidden_states")
        if isinstance(hidden, Tensor):
            kwargs["hidden_states"] = self.tp.gather_input_once(hidden)
        else:
            args = (self.tp.gather_input_once(args[0]), *args[1:])
        # The projections inside share this gather.
        with self.tp.input_is_gathered():
            return forward(*args, **kwargs)


class Replicated(Style):
    """Replicated, and run on activations between layers: norms, routers."""


class ReplicatedOnShards(Style):
    """Replicated, and run on sharded activations: norms of each rank's own heads."""

    def gradient(self, placement: Placement) -> Placement:
        """Return `Partial`: each rank's gradient comes from its own heads."""
        return Partial()


class Block(Style):
    """A block that every rank runs on full sequences, and whose activations are full inside.

    Its replicated parameters are plain tensors everywhere inside, as some modules use those of
    their submodules without calling them.
    """

    def apply(self, module: nn.Module) -> None:
        """See `Style.apply`; submodules get styles of their own besides."""
        super().apply(module)
        self._shown: list[tuple[nn.Module, str]] | None = None

    def run(self, module: nn.Module, forward: Forward, *args: Tensor, **kwargs: object) -> object:
        """Gather the sequences that are sharded, and return local chunks of the results."""
        if not self.tp.sequence_parallel:
            return forward(*args, **kwargs)
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        assert isinstance(hidden, Tensor), f"{type(module).__name__} takes no hidden states"
        args, kwargs = gather_sequences((args, kwargs), self.tp, local=hidden.shape)
        # Every rank computes the same inside, so that gradients are full and none is summed.
        with self.tp.unsharded_sequences():
            output = forward(*args, **kwargs)
        local = scatter_sequences(output, self.tp, local=hidden.shape)
        return self._sum_returned_parameters(module, local)

    def _sum_returned_parameters(self, module: nn.Module, output: Any) -> Any:
        """Return a result in which the gradients of the module's own parameters are summed.

        A bias that its caller adds meets local sequences there.
        """
        own = {id(parameter) for parameter in module._parameters.values()}
        if type(output) is not tuple:
            return output
        return tuple(
            collectives.copy_to_group(each, self.tp.group) if id(each) in own else each
            for each in output
        )

    def gradient(self, placement: Placement) -> Placement:
        """Return the same: every rank has seen all tokens."""
        return placement

    @contextmanager
    def _local_parameters(self, module: nn.Module) -> Generator[None, None, None]:
        if self._shown is None:
            self._shown = [
                (each, name)
                for each in module.modules()
                for name, parameter in each.named_parameters(recurse=False)
                if isinstance(parameter, DTensor) and parameter.placements == (Replicate(),)
            ]
        kept = [(each, name, each._parameters[name]) for each, name in self._shown]
        for each, name, parameter in kept:
            assert isinstance(parameter, DTensor)
            each._parameters[name] = parameter.to_local(grad_placements=[Replicate()])  # type: ignore[assignment]
        try:
            yield
        finally:
            for each, name, parameter in kept:
                each._parameters[name] = parameter


def gather_sequences(values: Any, tp: TensorParallel, *, local: torch.Size) -> Any:
    """Return arguments or results of a module with full sequences in place of local ones.

    Every rank must go on to compute the same from them.

    Args:
        values: A tensor, or a tuple, list or dict of values; others are returned as they are.
        tp: The ranks that shard sequences.
        local: The shape of the module's local hidden states, `[batch, local seq, ..., hidden]`.
    """
    return _map_sequences(values, local, partial(_gather_sequence, tp))


def scatter_sequences(values: Any, tp: TensorParallel, *, local: torch.Size) -> Any:
    """Return the same with local sequences in place of full ones."""
    full = torch.Size((local[0], local[1] * tp.size, *local[2:]))
    return _map_sequences(values, full, partial(_scatter_sequence, tp))


def _gather_sequence(tp: TensorParallel, values: Tensor) -> Tensor:
    return collectives.gather_for_replicated_use(values, tp.group, sequence_dim(values))


def _scatter_sequence(tp: TensorParallel, values: Tensor) -> Tensor:
    return collectives.scatter_to_group(values, tp.group, sequence_dim(values))


def _map_sequences(values: Any, hidden: torch.Size, function: Callable[[Tensor], Tensor]) -> Any:
    # Exact types: a named result of a model is none of these.
    if type(values) in (tuple, list):
        return type(values)(_map_sequences(each, hidden, function) for each in values)
    if type(values) is dict:
        return {name: _map_sequences(each, hidden, function) for name, each in values.items()}
    return function(values) if _has_tokens_of(values, hidden) else values


def _has_tokens_of(value: object, hidden: torch.Size) -> bool:
    """Return whether a value has an entry for each token of hidden states of a shape.

    Masks and biases of pairs of tokens and of heads have more dims, another batch or no floats.
    """
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and 2 < value.ndim <= len(hidden)
        and value.shape[:2] == hidden[:2]
    )


class Positions(Style):
    """Embeddings of positions or kinds of tokens, which are added to those of the tokens."""

    def run(self, module: nn.Module, forward: Forward, *args: Tensor, **kwargs: object) -> Tensor:
        """Return the local chunk of the full sequences' embeddings."""
        output = forward(*args, **kwargs)
        if not self.tp.sequence_parallel:
            return output
        return _scatter_sequence(self.tp, output)

    def gradient(self, placement: Placement) -> Placement:
        """Return the same: the backward pass gathers the gradient of all tokens."""
        return placement


class Column(Style):
    """A linear layer with sharded outputs."""

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Shard weight and bias along the outputs."""
        return {"weight": Shard(0), "bias": Shard(0)}

    def run(self, module: nn.Module, forward: Forward, *args: Tensor, **kwargs: object) -> Tensor:
        """Gather the input."""
        return forward(self.tp.gather_input(args[0]), *args[1:], **kwargs)


class GatheredColumn(Column):
    """A linear layer with sharded outputs that are gathered: fused projections, split later."""

    def run(self, module: nn.Module, forward: Forward, *args: Tensor, **kwargs: object) -> Tensor:
        """Gather the outputs."""
        is_alone = self.tp.sequence_parallel and not self.tp.input_is_full
        output = super().run(module, forward, *args, **kwargs)
        # Every rank computes the same from it, up to a `SplitRow`: its gradient is already full.
        gathered = collectives.gather_for_replicated_use(output, self.tp.group, -1)
        if not is_alone:
            return gathered
        # No surrounding block has gathered the sequences, and none takes its chunk of them.
        return _scatter_sequence(self.tp, gathered)


class GatheredConv1D(GatheredColumn):
    """The same for GPT-2's linear layer, whose weight is `[inputs, outputs]`."""

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Shard weight and bias along the outputs."""
        return {"weight": Shard(1), "bias": Shard(0)}

    def prepare(self, module: nn.Module) -> None:
        """Set the number of local outputs."""
        module.nf = module.nf // self.tp.size  # type: ignore[assignment, operator]


class OutputBias(Style):
    """A module that holds the bias of the output layer once more, and leaves its use to that."""

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Shard it along the vocabulary."""
        return {name: Shard(0) for name, _ in module.named_parameters(recurse=False)}


class OutputLayer(Column):
    """The layer that makes logits, which stay sharded along the vocabulary."""

    def run(self, module: nn.Module, forward: Forward, *args: Tensor, **kwargs: object) -> Tensor:
        """Gather the input; no `reduce_output` follows."""
        return forward(self.tp.gather_input_once(args[0]), *args[1:], **kwargs)


class Row(Style):
    """A linear layer with sharded inputs."""

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Shard the weight along the inputs; the bias is replicated."""
        return {"weight": Shard(1)}

    def run(self, module: nn.Module, forward: Forward, *args: Tensor, **kwargs: object) -> Tensor:
        """Reduce the partial outputs, then add the bias once."""
        bias = module._parameters.get("bias")
        if bias is None:
            return self.tp.reduce_output(forward(*args, **kwargs))
        # Before the reduction it would be added once per rank. `_local_parameters` puts it back.
        module._parameters["bias"] = None
        return self.tp.reduce_output(forward(*args, **kwargs)) + bias


class SplitRow(Row):
    """A linear layer with sharded inputs that is given replicated ones."""

    def run(self, module: nn.Module, forward: Forward, *args: Tensor, **kwargs: object) -> Tensor:
        """Take the local chunk of the input."""
        chunk = collectives.scatter_to_group(args[0], self.tp.group, -1)
        return super().run(module, forward, chunk, *args[1:], **kwargs)


class VocabularyEmbedding(Style):
    """An embedding that is sharded along the vocabulary."""

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Shard the rows."""
        return {"weight": Shard(0)}

    def prepare(self, module: nn.Module) -> None:
        """Map the padding token, whose row gets no gradient, to its row in the local shard."""
        padding = getattr(module, "padding_idx", None)
        if padding is not None:
            start, end = self._token_range(module)
            module.padding_idx = padding - start if start <= padding < end else None  # type: ignore[assignment]

    def run(self, module: nn.Module, forward: Forward, *args: Tensor, **kwargs: object) -> Tensor:
        """Look up this rank's tokens, zeros for the others, and sum over the ranks."""
        tokens = args[0]
        start, end = self._token_range(module)
        # Tokens of other ranks read row 0, so that the look-up stays in bounds, and are zeroed.
        is_local = (tokens >= start) & (tokens < end)
        embedded = forward(torch.where(is_local, tokens - start, 0))
        return self.tp.reduce_output(torch.where(is_local[..., None], embedded, 0))

    def _token_range(self, module: nn.Module) -> tuple[int, int]:
        """Return the range `[start, end)` of this rank's tokens."""
        num_tokens: int = module.num_embeddings  # type: ignore[assignment]
        return self.tp.vocabulary_range(num_tokens)


class Experts(Style):
    """The experts of a mixture, sharded among the ranks; the router is replicated.

    The module takes tokens `[tokens, hidden]`, expert indices `[tokens, top_k]` and routing weights
    `[tokens, top_k]`, as transformers' experts do, and skips an index equal to the number of
    experts.
    """

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Shard every parameter along the experts."""
        return {name: Shard(0) for name, _ in module.named_parameters(recurse=False)}

    def prepare(self, module: nn.Module) -> None:
        """Set the number of local experts."""
        # Without this flag grouped products leave rows that no local expert takes uninitialised.
        module._is_expert_parallel = True  # type: ignore[assignment]
        module.num_experts = module.num_experts // self.tp.size  # type: ignore[assignment, operator]

    def run(self, module: nn.Module, forward: Forward, *args: Tensor, **kwargs: object) -> Tensor:
        """Run the local experts on their tokens and sum over the ranks."""
        hidden, chosen, weights = args
        if self.tp.sequence_parallel:
            # Indices have no gradient, and need no conjugate.
            chosen = collectives.all_gather_dim(chosen, self.tp.group, sequence_dim(chosen))
        num_local: int = module.num_experts  # type: ignore[assignment]
        # Another rank's expert gets the index that the module skips: its output is added there.
        local = chosen - self.tp.rank * num_local
        local = torch.where((local >= 0) & (local < num_local), local, num_local)
        # Hidden states first: a shared expert may have gathered them already.
        hidden = self.tp.gather_input(hidden)
        return self.tp.reduce_output(forward(hidden, local, self.tp.gather_input(weights)))


class AdapterColumn(Style):
    """A submodule with sharded outputs, inside a layer that has gathered its input."""

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Shard weight and bias along the outputs."""
        return {"weight": Shard(0), "bias": Shard(0)}


class AdapterRow(Style):
    """A submodule with sharded inputs, inside a layer that reduces its output."""

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Shard the weight along the inputs; the bias is replicated."""
        return {"weight": Shard(1)}

    def run(self, module: nn.Module, forward: Forward, *args: Tensor, **kwargs: object) -> Tensor:
        """Add the bias, which adapters leave frozen, on the first rank alone."""
        bias = module._parameters.get("bias")
        if bias is not None and self.tp.rank > 0:
            assert not bias.requires_grad
            module._parameters["bias"] = None
        return forward(*args, **kwargs)


class AdapterDropout(Style):
    """Dropout before a matrix with sharded inputs, with the mask that a single rank would draw."""

    def run(self, module: nn.Module, forward: Forward, *args: Tensor, **kwargs: object) -> Tensor:
        """Draw the mask of all inputs, the same on every rank, and apply the local chunk."""
        (values,) = args
        # Tensor-parallel ranks have the same random state, so each draws the mask of all inputs.
        width = values.shape[-1] * self.tp.size
        factors = forward(values.new_ones((*values.shape[:-1], width)))
        return values * collectives.local_chunk(factors, self.tp.group, -1)


_DROPOUT = "lora_dropout.default"
_ADAPTER_STYLES: dict[type[Style], dict[str, type[Style]]] = {
    Column: {
        "base_layer": AdapterColumn,
        "lora_A.default": ReplicatedOnShards,
        "lora_B.default": AdapterColumn,
    },
    Row: {
        "base_layer": AdapterRow,
        _DROPOUT: AdapterDropout,
        "lora_A.default": AdapterRow,
        "lora_B.default": ReplicatedOnShards,
    },
    **{
        replicated: dict.fromkeys(("base_layer", "lora_A.default", "lora_B.default"), replicated)
        for replicated in (Replicated, ReplicatedOnShards)
    },
}
"""Styles of the submodules, by the layer's style or a superclass of it."""


def adapter_styles(
    model: nn.Module,
    layers: Iterable[str],
    style_of: Callable[[str], type[Style] | ParallelStyle | None],
) -> dict[str, type[Style]]:
    """Return the style of each submodule of the layers with adapters, by its name in `model`.

    Args:
        model: The model.
        layers: The names of those layers.
        style_of: The style of a layer; None if the plan does not name it.

    Raises:
        ValueError: Adapters do not support a layer's style.
    """
    styles: dict[str, type[Style]] = {}
    for name in layers:
        style = style_of(name)
        if style is None:
            continue
        for suffix, adapter_style in _adapter_styles_of(style, name).items():
            inner = f"{name}.{suffix}"
            # Peft puts an identity there if the dropout probability is 0.
            if suffix != _DROPOUT or isinstance(model.get_submodule(inner), nn.Dropout):
                styles[inner] = adapter_style
    return styles


def _adapter_styles_of(style: type[Style] | ParallelStyle, name: str) -> Mapping[str, type[Style]]:
    if isinstance(style, type):
        for kind, styles in _ADAPTER_STYLES.items():
            if issubclass(style, kind):
                return styles
    given = style.__name__ if isinstance(style, type) else type(style).__name__
    raise ValueError(
        f"policy.dtensor_cfg.custom_parallel_plan has the style {given} for {name}, which adapters "
        "do not support: name it colwise or rowwise, or leave it out of "
        "policy.dtensor_cfg.lora.target_modules"
    )
