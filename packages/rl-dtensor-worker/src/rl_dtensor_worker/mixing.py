"""Blocks that mix the tokens of a row, and how each of them gets sequences one by one.

Packed and context-parallel layouts hand an attention that transformers dispatches the layout of its
sequences (`attention`). Linear attention, state-space layers, short convolutions and attention that
a model computes by hand know nothing of it. A whole block of that kind is run on unpacked rows:
its inputs are gathered into right-padded rows, sequences of similar length together, and its
outputs are packed again. As its mixing is causal, padding on the right changes nothing before it,
whatever kernel computes it. With context parallelism every rank runs such a block on full
sequences, and keeps its own chunks.

Which blocks mix tokens cannot be read from a config. It is found out by changing a token's hidden
state before a block, and looking at the others after it.
"""

from __future__ import annotations

import inspect
import math
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import AttentionInterface

from rl_dtensor_worker import attention
from rl_dtensor_worker.parallel import collectives
from rl_dtensor_worker.parallel.fsdp import abandon_pass
from rl_dtensor_worker.parallel.structure import blocks_of
from rl_dtensor_worker.parallel.styles import Style

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

    from torch import nn
    from transformers import PreTrainedModel

    from rl_dtensor_worker.attention import AttentionRows, ContextRows

    Forward = Callable[..., Any]

MODEL_ERRORS = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a model raises that expects other shapes, masks or caches than it gets."""
_PROBED_TOKENS = 8
# Arguments of an attention that are used here, or are the same for all of its kinds.
_KNOWN_TENSORS = {"attention_mask", "s_aux", "position_ids"}
# Kinds of layers that see all tokens before, or choose among them by themselves.
_WITHOUT_WINDOWS = frozenset(
    [
        "attention",
        "conv",
        "full_attention",
        "hybrid",
        "indexed_attention",
        "linear_attention",
        "mamba",
        "mlp",
        "moe",
        "recurrent",
    ]
)
# Names in configs of how far back a token sees.
_WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "window_size")
# Attributes of modules that say over how many positions something is the same.
_SPANS = ("floor_scale",)
# Attributes of modules that say among how many tokens before it a token chooses.
_CHOICES = ("index_topk",)
_SHORT_WINDOW = 4
# Relative to the largest output: what a change of one token's hidden state does to the others'.
_MIXED = 1e-3


class ModelError(Exception):
    """A model's forward raises, as it expects other shapes, masks or caches than it gets."""


@contextmanager
def model_errors(model: PreTrainedModel) -> Generator[None, None, None]:
    """Raise `ModelError` for what a forward inside raises; what is refused stays as it is.

    FSDP is as before the forward. A lack of memory says nothing of the model.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except MODEL_ERRORS as error:
        if str(error).startswith("policy"):
            raise
        abandon_pass(model)
        raise ModelError(f"{type(error).__name__}: {error}") from error


class Sequences(Protocol):
    """A layout that says where in a forward's hidden states each sequence is."""

    @property
    def num_tokens(self) -> int:
        """How many tokens this rank's hidden states have."""
        ...

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks have tokens of the same sequences."""
        ...

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return `[1, num_tokens, ...]` as groups of right-padded rows, `[rows, width, ...]`."""
        ...

    def join(self, groups: list[torch.Tensor]) -> torch.Tensor:
        """Return groups of rows as `[1, num_tokens, ...]`; the reverse of `split`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedSequenceRows:
    """Packed sequences, on one rank or in chunks on several: `Sequences`."""

    rows: AttentionRows
    context: ContextRows | None = None

    @property
    def num_tokens(self) -> int:
        """See `Sequences.num_tokens`."""
        ranks = 1 if self.context is None else self.context.group.size()
        return self.rows.places.numel() // ranks

    @property
    def is_sharded(self) -> bool:
        """See `Sequences.is_sharded`."""
        return self.context is not None

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """See `Sequences.split`."""
        if self.context is not None:
            # Each rank keeps the outputs of its own chunks, so that gradients are partial.
            group = self.context.group
            gathered = collectives.gather_for_sharded_use(values, group, 1)
            values = gathered.index_select(1, self.context.shards.gathered)
        return self.rows.groups.gather(values[0])

    def join(self, groups: list[torch.Tensor]) -> torch.Tensor:
        """See `Sequences.join`."""
        flat = torch.cat([group.flatten(0, 1) for group in groups])
        packed = flat.index_select(0, self.rows.places)[None]
        return packed if self.context is None else self.context.shard(packed)


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedRows:
    """Right-padded rows, which a block around has gathered: `Sequences`."""

    num_tokens: int
    is_sharded: bool = False

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """See `Sequences.split`."""
        return [values]

    def join(self, groups: list[torch.Tensor]) -> torch.Tensor:
        """See `Sequences.join`."""
        return groups[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """Which blocks are run on unpacked rows, and with which mask."""

    names: tuple[str, ...] = ()
    takes_mask: bool = False
    """Whether they need a causal mask; otherwise they are causal without one."""
    has_attention: bool = False
    """Whether attention that could be given a layout is among them, and is their own."""
    takes_rows: bool = False
    """Whether attention among them is given their rows as its layout, by which windows hold."""
    keeps_mask: bool = False
    """Whether they are given the model's own mask, which has a bias of positions."""


class Mixing:
    """What of a model is run on unpacked rows; at first nothing."""

    def __init__(self) -> None:
        self.way = Way()
        self.takes_layout = True
        """Whether the model's attention is given the layout of the sequences."""
        self.attention: str | None = None
        """The attention that takes a layout where the model dispatches one; else its own."""
        self.has_windows_in_masks = False
        """Whether a layer says by its mask alone how far back a token sees."""
        self._undo: list[Callable[[], None]] = []
        self._sequences: Sequences | None = None
        self._last: Sequences | None = None

    @contextmanager
    def using(self, sequences: Sequences | None) -> Generator[None, None, None]:
        """Give the blocks of forwards inside these sequences; None: rows as they are."""
        before, self._sequences = self._sequences, sequences
        self._last = sequences if torch.is_grad_enabled() else None
        try:
            yield
        finally:
            self._sequences = before

    @contextmanager
    def recomputing(self) -> Generator[None, None, None]:
        """Give the blocks what the last forward gave them, for a backward pass that repeats it."""
        last, self._last = self._last, None
        try:
            with self.using(last):
                yield
        finally:
            self._last = None

    def choose(self, model: PreTrainedModel, way: Way, own_attention: str | None) -> None:
        """Run the blocks of `way`, and no others, on unpacked rows.

        Args:
            model: The model.
            way: Names them.
            own_attention: The attention that the model has had before `take_attention`.
        """
        # A block that is run as a whole may choose its mask by the attention's name.
        config = model.config
        config._attn_implementation = own_attention if way.has_attention else self.attention
        self.takes_layout = config._attn_implementation == attention.NAME
        for undo in self._undo:
            undo()
        self.way = way
        modules = [model.get_submodule(name) for name in way.names]
        self._undo = [_replace(each, partial(self._run, way, each)) for each in modules]

    def _run(self, way: Way, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        sequences = self._sequences
        if sequences is None:
            return forward(*args, **kwargs)
        arguments = _by_name(type(module).forward, module, *args, **kwargs)
        return _on_rows(sequences, forward, arguments, way)


def _by_name(forward: Forward, module: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return all arguments of a module's forward by name."""
    bound = inspect.signature(forward).bind(module, *args, **kwargs)
    found: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        is_rest = bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        found |= value if is_rest else {name: value}
    return found


def _on_rows(sequences: Sequences, forward: Forward, arguments: dict[str, Any], way: Way) -> Any:
    """Call `forward` once for each group of rows, and return its results joined."""
    if way.keeps_mask and sequences.is_sharded:
        raise ValueError("its mask is of this rank's tokens alone")
    split = {name: _split(sequences, value) for name, value in arguments.items()}
    hidden = next((groups for groups in split.values() if groups is not None), None)
    if hidden is None:
        raise TypeError("it takes no hidden states of all tokens")
    outputs: list[Any] = []
    for index, states in enumerate(hidden):
        given = {
            name: value if (groups := split[name]) is None else groups[index]
            for name, value in arguments.items()
        }
        mask = _causal_mask(states) if way.takes_mask else None
        if way.takes_rows:
            mask = attention.layout_arguments(attention.FullRows(), states.device)["attention_mask"]
        # None of what the model has made for packed tokens fits their rows as it is.
        masks = [name for name in given if "mask" in name]
        given |= {n: _mask_of_rows(given[n], states) if way.keeps_mask else mask for n in masks}
        if isinstance(biases := given.get("alibi"), torch.Tensor):
            given["alibi"] = _alibi_of_rows(biases, states)
        outputs.append(forward(**given))
    return _join(sequences, outputs, hidden)


def _mask_of_rows(mask: Any, states: torch.Tensor) -> Any:
    """Return the mask of rows `[rows, width, hidden]` from that of all packed tokens as one row.

    That of the first `width` tokens: a model that does not know of the sequences has counted the
    positions from the start of the row, as in each row by itself.

    Raises:
        ValueError: It is no such mask.
    """
    if not isinstance(mask, torch.Tensor):
        return mask
    width = states.shape[1]
    is_square = mask.ndim == 4 and mask.shape[-1] == mask.shape[-2] >= width
    # No token sees a later one. With sequences or a window the last does not see the first either.
    hides = is_square and mask.shape[-1] > 1 and bool((mask[..., -1, 0] == mask[..., 0, -1]).any())
    if not is_square or hides:
        raise ValueError(f"its mask {tuple(mask.shape)} is not that of one causal row")
    return mask[..., :width, :width]


def _alibi_of_rows(biases: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Return the position biases of rows `[rows, width, hidden]`, `[rows * heads, 1, width]`.

    Or `[rows, heads, 1, width]`, if they are given so.

    Args:
        biases: Those of one row, `[heads, 1, seq]` or `[1, heads, 1, seq]`: linear in the position
            (arXiv:2108.12409).
        states: The rows' hidden states.
    """
    rows, width = states.shape[:2]
    slopes = biases[..., 1:2] - biases[..., :1]
    positions = torch.arange(width, device=biases.device, dtype=biases.dtype)
    return (slopes * positions).repeat(rows, *[1] * (biases.ndim - 1))


def _split(sequences: Sequences, value: Any) -> list[Any] | None:
    """Return the groups of a value that has an entry for each token, else None."""
    if isinstance(value, tuple):
        parts = [_split(sequences, each) for each in value]
        known = [part for part in parts if part is not None]
        if not known:
            return None
        return [
            tuple(
                each if part is None else part[i] for each, part in zip(value, parts, strict=True)
            )
            for i in range(len(known[0]))
        ]
    if isinstance(value, torch.Tensor) and value.ndim > 1:
        return sequences.split(value) if value.shape[1] == sequences.num_tokens else None
    return None


def _join(sequences: Sequences, outputs: list[Any], hidden: list[torch.Tensor]) -> Any:
    """Return the results of all groups as one; None for a tensor without an entry per token."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_join(sequences, list(each), hidden) for each in zip(*outputs, strict=True))
    if not isinstance(first, torch.Tensor):
        return first
    # Weights of attention, for example, are per pair of tokens.
    per_token = all(o.shape[:2] == h.shape[:2] for o, h in zip(outputs, hidden, strict=True))
    return sequences.join(outputs) if per_token else None


def _causal_mask(states: torch.Tensor) -> torch.Tensor:
    """Return what is added to the scores of rows of hidden states, `[rows, 1, width, width]`."""
    rows, width = states.shape[:2]
    lowest = torch.finfo(states.dtype).min
    mask = torch.full((width, width), lowest, dtype=states.dtype, device=states.device)
    return mask.triu(1).expand(rows, 1, width, width)


def _replace(module: nn.Module, run: Callable[..., Any]) -> Callable[[], None]:
    """Let `run(forward, ...)` stand before a module's forward; return what takes it back.

    Inside of the style of a tensor-parallel block, which gathers the sequences.
    """
    own = module.forward
    if isinstance(own, partial) and isinstance(getattr(own.func, "__self__", None), Style):
        style_args = own.args[:-1]
        module.forward = partial(own.func, *style_args, partial(run, own.args[-1]))
    else:
        module.forward = partial(run, own)

    def undo() -> None:
        module.forward = own

    return undo


@torch.no_grad()
def ways_of(
    model: PreTrainedModel, unsharded: Callable[[], AbstractContextManager[None]]
) -> Generator[Way, None, None]:
    """Yield what may keep a model's sequences apart, the fastest first. Collective.

    Each runs forwards on a few tokens; whether it does keep them apart is another check.

    Args:
        model: The model, in eval mode.
        unsharded: Opens a context in which sequences are not sharded.
    """

    def mixing_blocks(*, without_attention: bool) -> dict[str, bool]:
        try:
            with unsharded(), model_errors(model):
                return _mixing_blocks(model, without_attention=without_attention)
        except ModelError:
            # Its blocks do not run without their attention, or twice: none can be chosen.
            return {}

    yield Way()
    beside = mixing_blocks(without_attention=True)
    # The masks that are left out may be all that says how far back a token sees.
    has_windows = _has_windows(model)
    if beside and not (has_windows and any(beside.values())):
        yield Way(names=tuple(beside))
    every = tuple(mixing_blocks(without_attention=False))
    if has_windows and every and model.config._attn_implementation == attention.NAME:
        yield Way(names=every, takes_rows=True)
    if has_windows or not every:
        return
    for takes_mask in (False, True):
        yield Way(names=every, takes_mask=takes_mask, has_attention=True)
    yield Way(names=every, has_attention=True, keeps_mask=True)


def take_attention(model: PreTrainedModel, *, tolerance: float) -> bool:
    """Switch a model to this package's attention if it dispatches its own, and computes the same.

    A model that an option has given another attention keeps that. Return whether a layer says by
    its mask alone how far back a token sees.

    Args:
        model: The model, in eval mode.
        tolerance: By how much logits may differ, relative to the largest.
    """
    config = model.config
    own = config._attn_implementation
    # Without support of `sdpa` it computes what that does not, of which sinks are known here.
    is_default = own == "sdpa" or (own == "eager" and not model._supports_sdpa)
    if not is_default:
        return False
    expected, calls, by_mask = run_probe(model), list[bool](), list[bool]()

    def record(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        tensors = {name for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
        calls.append(own == "sdpa" or tensors <= _KNOWN_TENSORS)
        by_mask.append(kwargs.get("sliding_window") is None and _has_window(args[0]))
        return attention.packed_attention_forward(*args, **kwargs)

    attention.register_attention()
    config._attn_implementation = attention.NAME
    difference = math.inf
    # It may be by hand, with a mask that only its own kind of attention has.
    with suppress(ModelError), model_errors(model), _attention_replaced(record):
        found = run_probe(model)
        difference = float((found - expected).abs().max() / expected.abs().max())
    # `not <=` rather than `>`, so that NaN fails.
    if not (calls and all(calls) and difference <= tolerance):
        config._attn_implementation = own
    return any(by_mask)


def _has_window(module: nn.Module) -> bool:
    """Return whether the config of an attention layer says how far back a token sees."""
    with suppress(ValueError, TypeError):
        return attention.window_of(module, None) is not None
    return False


@contextmanager
def short_windows(model: PreTrainedModel) -> Generator[None, None, None]:
    """Let a model see a few tokens back inside, so that a probe of few tokens shows how far.

    For one whose masks alone say it, and are made anew in each forward.
    """
    text = model.config.get_text_config()
    named = [(text, name) for name in attention.WINDOWS_OF_KINDS.values()]
    named += [(module, name) for module in model.modules() for name in _SPANS]
    with _shortened(named):
        yield


@contextmanager
def few_choices(model: PreTrainedModel) -> Generator[None, None, None]:
    """Let a token choose among few tokens inside, so that a probe of few tokens shows that it does.

    For sparse attention, which sees all tokens of a shorter sequence.
    """
    with _shortened([(module, name) for module in model.modules() for name in _CHOICES]):
        yield


@contextmanager
def _shortened(named: list[tuple[Any, str]]) -> Generator[None, None, None]:
    """Bound numbers of objects, given by name, inside; those that lack one stay as they are."""
    found = [(each, name, getattr(each, name, None)) for each, name in named]
    changed = [(each, name, size) for each, name, size in found if isinstance(size, (int, float))]
    for each, name, size in changed:
        setattr(each, name, min(size, _SHORT_WINDOW))
    try:
        yield
    finally:
        for each, name, size in changed:
            setattr(each, name, size)


def _mixing_blocks(model: PreTrainedModel, *, without_attention: bool) -> dict[str, bool]:
    """Return the blocks whose outputs depend on the tokens before.

    By name, with whether what is left out is among what they do.

    Args:
        model: The model, in eval mode.
        without_attention: Leave out what dispatched attention does.
    """
    found: dict[str, bool] = {}
    left_out: list[None] = []

    def no_attention(
        _module: nn.Module,
        query: torch.Tensor,
        _: object,
        value: torch.Tensor,
        *__: Any,
        **___: Any,
    ) -> tuple[torch.Tensor, None]:
        left_out.append(None)
        rows, heads, width, _size = query.shape
        return value.new_zeros(rows, width, heads, value.shape[-1]), None

    def probe(name: str, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        hidden = next((each for each in given if _is_hidden(each)), None)
        if hidden is None:
            return forward(*args, **kwargs)
        left_out.clear()
        changed_args, changed_kwargs = _with_other_token(hidden, args, kwargs)
        output = _rows_of(forward(*args, **kwargs), hidden)
        changed = _rows_of(forward(*changed_args, **changed_kwargs), hidden)
        difference = (changed - output)[:, 1:].abs().max()
        if bool(difference > _MIXED * (changed - output).abs().max()):
            found[name] = bool(left_out)
        return forward(*args, **kwargs)

    undo = [_replace(block, partial(probe, name)) for name, block in blocks_of(model).items()]
    try:
        if without_attention:
            with _attention_replaced(no_attention):
                run_probe(model)
        else:
            run_probe(model)
    finally:
        for each in undo:
            each()
    return found


def run_probe(model: PreTrainedModel) -> torch.Tensor:
    """Run a forward on one row of a few tokens, and return its logits."""
    device = next(model.parameters()).device
    vocab_size = model.config.get_text_config().vocab_size
    tokens = torch.arange(1, _PROBED_TOKENS + 1, device=device)[None] % vocab_size
    return model(input_ids=tokens, use_cache=False).logits


@contextmanager
def _attention_replaced(function: Callable[..., Any]) -> Generator[None, None, None]:
    """Let `function` stand for the attention of this package."""
    AttentionInterface.register(attention.NAME, function)
    try:
        yield
    finally:
        AttentionInterface.register(attention.NAME, attention.packed_attention_forward)


def _is_hidden(value: object) -> bool:
    """Return whether an argument of a block is hidden states, `[1, seq, ...]`."""
    return isinstance(value, torch.Tensor) and value.ndim > 2 and value.is_floating_point()


def _with_other_token(
    hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Return the arguments of a block with other hidden states of the first token."""
    changed = hidden.clone()
    changed[:, 0] = -changed[:, 0] + 1

    def other(value: Any) -> Any:
        return changed if value is hidden else value

    return tuple(other(each) for each in args), {n: other(each) for n, each in kwargs.items()}


def _rows_of(output: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return a block's first result as rows, which mixtures of experts may have flattened."""
    first = output if isinstance(output, torch.Tensor) else output[0]
    is_flat = first.ndim == 2 and first.shape[0] == hidden.shape[:2].numel()
    return first.unflatten(0, hidden.shape[:2]) if is_flat else first


def _has_windows(model: PreTrainedModel) -> bool:
    """Return whether a mask may hide tokens that are far back from a model's attention.

    The probes are too short to show it.
    """
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    return not kinds <= _WITHOUT_WINDOWS or any(
        getattr(text, name, None) is not None for name in _WINDOWS
    )
